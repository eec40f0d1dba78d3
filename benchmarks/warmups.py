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

from contest import contest, trained
from tasks import TASKS

RECIPE = "topka2a(0.02, schedule='local', warmup={}, wire='e3m0')"


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

    def run(task: str, way: str, rate: float, seed: int) -> float:
        return trained(task, way, rate, args.steps, args.seed + seed)

    contest(ways, run, args, steps=args.steps, seed=args.seed)


if __name__ == "__main__":
    main()
