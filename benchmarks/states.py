"""Rounds: whether it lowers the loss to average the optimizers' states, too.

    torchrun --nproc-per-node 4 benchmarks/states.py \
        --out benchmarks/records/states_202611.json

In `diloco` each rank keeps the state of its optimizer. Here the ranks' momenta are
averaged besides: both after each round (as Local Adam does), or the first after three
rounds and the second after six (as DES-LOC proposes). On the five tasks of
`benchmarks/tasks.py`, each way with the best of three learning rates; with `--seeds`
from more seeds. `--ways` adds states of one's own in rounds that are shorter, and so
send as many bytes. What is averaged is exchanged by this program, densely: for this
comparison alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from contest import contest, trained
from tasks import TASKS
from torch.optim import Optimizer

# Rounds after which the first momentum is averaged, and the second; 0: never.
WAYS = {"own": (0, 0), "each round": (1, 1), "after 3 and 6 rounds": (3, 6)}
# What sends as much as the last of these does, without states.
MORE = "own, in shorter rounds"
SHORTER = 1.5
MOMENTA = ("exp_avg", "momentum_buffer"), ("exp_avg_sq",)


@torch.no_grad()
def average(optimizer: Optimizer, names: tuple[str, ...]) -> None:
    """The mean over ranks of these states, on all of them."""
    for state in optimizer.state.values():
        for name in names:
            if isinstance(state.get(name), torch.Tensor):
                dist.all_reduce(state[name])
                state[name] /= dist.get_world_size()


def train(
    task: str, way: str, rate: float, seed: int, args: argparse.Namespace
) -> float:
    dense, every = args.steps * 2 // 5, args.every
    if way == MORE:
        every = round(every / SHORTER)

    def after(step: int, optimizer: Optimizer) -> None:
        rounds, inside = divmod(step + 1 - dense, every)
        if rounds > 0 and not inside:
            for names, period in zip(MOMENTA, WAYS.get(way, (0, 0)), strict=True):
                if period and rounds % period == 0:
                    average(optimizer, names)

    scheme = f"diloco(every={every}, warmup={dense})"
    return trained(task, scheme, rate, args.steps, seed, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS, MORE])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    def run(task: str, way: str, rate: float, seed: int) -> float:
        return train(task, way, rate, seed, args)

    how = {"steps": args.steps, "every": args.every}
    contest(args.ways, run, args, args.seeds, **how)


if __name__ == "__main__":
    main()
