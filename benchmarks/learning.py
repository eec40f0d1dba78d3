"""What a scheme does to learning: run on every rank.

    gradtide lab run --hosts 4 --rate none -- \
        python benchmarks/learning.py --out benchmarks/records/learning_gpt.json

Trains a workload from each seed under each scheme, with the workload's own optimizer,
clipping and schedule, and evaluates it on held-out data every so many steps. Runs that
the record already holds are not run again, so that a run cut short can be continued.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import gradtide
from gradtide.lab.record import machine, versions
from gradtide.lab.spec import split_schemes
from gradtide.lab.workloads import build

SCHEMES = ",".join(
    (
        "wfbp",
        "topka2a(0.02, schedule='local', warmup=240)",
        "oktopk(0.01, schedule='local', warmup=240)",
        "exdyna(0.01, schedule='local', warmup=240)",
    )
)


def train(
    workload: str, scheme: str, seed: int, steps: int, every: int
) -> list[dict[str, float]]:
    """Scores on held-out data (and `step`) every `every` steps and at the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    work = build(workload, rank=rank, size=size, seed=seed)
    model, optimizer = work.model, work.optimizer
    assert work.evaluate is not None, f"{workload} cannot be evaluated"
    scheduler = work.scheduler(optimizer) if work.scheduler else None
    curve = []
    sync = gradtide.replicate(model, optimizer, scheme)
    for step in range(steps):
        work.loss(model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
        if work.max_norm is not None:
            sync.clip_grad_norm_(work.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            curve.append({"step": step + 1, **work.evaluate(model)})
    sync.remove()
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="gpt")
    parser.add_argument("--schemes", default=SCHEMES, help="with commas between")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    command = (
        f"gradtide lab run --hosts {dist.get_world_size()} --rate none -- "
        f"python benchmarks/learning.py --workload {args.workload} --schemes "
        f"{shlex.quote(args.schemes)} --seeds {args.seeds} --steps {args.steps}"
    )
    record: dict[str, Any] = {
        "command": command,
        "versions": versions(),
        "machine": machine(),
        "workload": args.workload,
        "ranks": dist.get_world_size(),
        "steps": args.steps,
        "runs": [],
    }
    if args.out.exists():
        record = json.loads(args.out.read_text())
    done = {(run["scheme"], run["seed"]) for run in record["runs"]}
    dist.barrier()  # everybody has read it before the first result is written
    for seed in range(args.seeds):
        for scheme in split_schemes(args.schemes):
            if (scheme, seed) in done:
                continue
            begin = time.perf_counter()
            curve = train(args.workload, scheme, seed, args.steps, args.every)
            if dist.get_rank() == 0:
                seconds = time.perf_counter() - begin
                print(
                    f"{scheme} seed {seed}: {curve[-1]} in {seconds:.0f} s", flush=True
                )
                run = {"scheme": scheme, "seed": seed, "command": command}
                record["runs"].append(run | {"curve": curve})
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
