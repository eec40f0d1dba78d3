"""How long the warm-up of a sparse recipe has to be.

    torchrun --nproc-per-node 4 benchmarks/warmups.py \
        --out benchmarks/records/warmups_202611.json

A recipe that sends the largest entries of its steps begins with steps that are sent
whole. On the five tasks of `benchmarks/tasks.py`, for each number of such steps at the
best of three learning rates: the loss at the end, beside dense training's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist
from contest import contest
from tasks import TASKS, build

import gradtide

RECIPE = "topka2a(0.02, schedule='local', warmup={}, wire='e3m0')"


def train(task: str, scheme: str, rate: float, args: argparse.Namespace) -> float:
    work = build(task, dist.get_rank(), args.seed, rate, args.steps)
    assert work.evaluate is not None
    assert work.scheduler is not None
    model, optimizer = work.model, work.optimizer
    scheduler = work.scheduler(optimizer)
    sync = gradtide.replicate(model, optimizer, scheme)
    for step in range(args.steps):
        work.loss(model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    sync.flush()
    loss = work.evaluate(model)["loss"]
    sync.remove()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--recipe", default=RECIPE, help="{}: the warm-up's steps")
    parser.add_argument("--warmups", default="20,60,160")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lengths = [int(each) for each in args.warmups.split(",")]
    ways = ["wfbp", *(args.recipe.format(length) for length in lengths)]

    def run(task: str, way: str, rate: float) -> float:
        return train(task, way, rate, args)

    contest("warmups.py", ways, run, args, steps=args.steps, seed=args.seed)


if __name__ == "__main__":
    main()
