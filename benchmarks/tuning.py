"""What a search for the size of buckets finds during training: run on every rank.

    gradtide lab run --hosts 4 --rate 1gbit -- \
        python benchmarks/tuning.py --workload replay:resnet50 --out tuning.json

A workload is trained until the search has ended. Then what was found and fixed sizes,
evenly spread on a logarithmic scale, take turns in the same training, some steps each
for several rounds; compared are the medians of rank 0's steps.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

import gradtide
from gradtide.fusion import BySize
from gradtide.lab.record import commit, machine, versions
from gradtide.lab.workloads import Workload, build

SETTLE = 2  # steps after a change that are not measured
SCHEME = "Scheme(Dense(), fusion=Bayesian())"


class Training:
    """A workload and how far it has come."""

    def __init__(self, work: Workload, scheme: str) -> None:
        self.work, self.step = work, 0
        self.sync = gradtide.replicate(work.model, work.optimizer, scheme)

    def go(self) -> float:
        """One step; its seconds."""
        start = time.perf_counter()
        work = self.work
        work.loss(work.model, work.batch(self.step)).backward()  # type: ignore[no-untyped-call]
        if work.max_norm is not None:
            self.sync.clip_grad_norm_(work.max_norm)
        work.optimizer.step()
        work.optimizer.zero_grad()
        self.step += 1
        return time.perf_counter() - start


def search(training: Training, most: int) -> dict[str, Any]:
    """Train until the search has ended."""
    found, start = training.sync.tuning, time.perf_counter()
    assert found is not None, "the scheme's fusion is none that is searched for"
    while not found.done and training.step < most:
        training.go()
    assert found.best is not None, f"nothing was tried in {most} steps"
    return {
        "fusion": repr(found.fusion),
        "found": repr(found.fusion.at(found.best.megabytes)),
        "done": found.done,
        "steps": training.step,
        "seconds": time.perf_counter() - start,
        "tried": [list(trial) for trial in found.tried],
    }


def compare(
    training: Training, fusions: list[BySize], rounds: int, steps: int
) -> list[list[float]]:
    """The seconds of the steps of every fusion; all take turns."""
    times: list[list[float]] = [[] for _ in fusions]
    scheme = training.sync.scheme
    for turn in range(rounds):
        for i in range(len(fusions)):
            own = (i + turn) % len(fusions)  # none always comes after the same one
            training.sync.adopt(replace(scheme, fusion=fusions[own]))
            for _ in range(SETTLE):
                training.go()
            times[own] += [training.go() for _ in range(steps)]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="replay:resnet50")
    parser.add_argument("--scheme", default=SCHEME)
    parser.add_argument("--fixed", type=int, default=8, help="sizes to compare with")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="of each in a round")
    parser.add_argument("--most", type=int, default=400, help="steps of a search")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    work = build(args.workload, rank=rank, size=size, seed=0)
    training = Training(work, args.scheme)
    searched = search(training, args.most)
    found = training.sync.tuning
    assert found is not None
    assert found.best is not None
    whole = sum(p.nbytes for p in work.model.parameters()) / 1e6
    low = found.fusion.smallest
    span = [low * (whole / low) ** (i / (args.fixed - 1)) for i in range(args.fixed)]
    megabytes = [found.best.megabytes, *(float(f"{size:.3g}") for size in span)]
    fusions = [found.fusion.at(size) for size in megabytes]
    times = compare(training, fusions, args.rounds, args.steps)
    training.sync.remove()
    if rank == 0:
        _report(args, size, searched, fusions, times)
    dist.destroy_process_group()


def _report(
    args: argparse.Namespace,
    size: int,
    searched: dict[str, Any],
    fusions: list[BySize],
    times: list[list[float]],
) -> None:
    medians = [median(row) for row in times]
    least = min(medians[1:])
    print(f"search: {searched['steps']} steps, {searched['seconds']:.0f} s")
    for i, (fusion, seconds) in enumerate(zip(fusions, medians, strict=True)):
        name = "found" if i == 0 else "fixed"
        print(f"{name}  {fusion.megabytes:8.3g} MB  {1e3 * seconds:9.1f} ms")
    print(f"found is {medians[0] / least - 1:+.1%} of the best fixed size")
    if args.out is not None:
        record = {
            "workload": args.workload,
            "scheme": args.scheme,
            "ranks": size,
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            "search": searched,
            "fusions": [repr(fusion) for fusion in fusions],
            "seconds": times,
            "above_best_fixed": medians[0] / least - 1,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
