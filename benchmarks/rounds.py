"""How much of the time ranks compute that exchange what they did every H steps.

    gradtide lab run --hosts 4 --rate 50mbit -- \
        python benchmarks/rounds.py --out benchmarks/records/rounds.json

Trains a replay for whole rounds under a scheme, and for as many steps without any
exchange, in turn. The share is that of the time without in the time with it: what a
round costs beyond that, on the link and on processors, counts as not computing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import gradtide
from gradtide.lab.record import machine, versions
from gradtide.lab.workloads import Workload, build

STEPS = 32
SCHEME = (
    "exdyna(0.015625, wire='bf16', schedule='local', every=32, delay=24, fragments=4)"
)


def train(work: Workload, first: int, steps: int) -> float:
    """Seconds of a step on the slowest rank, in the mean over so many."""
    dist.barrier()
    begin = time.perf_counter()
    for step in range(first, first + steps):
        work.loss(work.model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
        work.optimizer.step()
        work.optimizer.zero_grad()
    seconds = torch.tensor((time.perf_counter() - begin) / steps)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="replay:gpt-30m")
    parser.add_argument("--scheme", default=SCHEME)
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3, help="of 32 steps, timed")
    parser.add_argument("--rate", default="50mbit", help="as the lab was told")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, with_it = (
        build(args.workload, rank=rank, size=size, seed=0, step_ms=args.step_ms)
        for _ in range(2)
    )
    sync = gradtide.replicate(with_it.model, with_it.optimizer, args.scheme)
    train(alone, 0, STEPS)
    train(with_it, 0, 2 * STEPS)  # the first round has nothing to apply yet
    times: dict[str, list[float]] = {"alone": [], "with it": []}
    for turn in range(args.rounds):
        times["alone"].append(train(alone, (turn + 1) * STEPS, STEPS))
        times["with it"].append(train(with_it, (turn + 2) * STEPS, STEPS))
    sync.remove()
    if rank == 0:
        share = median(times["alone"]) / median(times["with it"])
        record: dict[str, Any] = vars(args) | {
            "out": args.out.name,
            "ranks": size,
            "versions": versions(),
            "machine": machine(),
            "seconds_of_a_step": times,
            "share": share,
        }
        print(f"{times}: computing {share:.1%} of the time")
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
