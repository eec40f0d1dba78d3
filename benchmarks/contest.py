"""Ways to train, each at the best of three learning rates, on tasks of `tasks.py`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from tasks import TASKS, build
from torch.optim import Optimizer

import gradtide
from gradtide.lab.record import commit, machine, versions

FACTORS = (0.5, 1.0, 2.0)  # times the task's usual rate


def trained(
    task: str,
    scheme: str,
    rate: float,
    steps: int,
    seed: int = 0,
    after: Callable[[int, Optimizer], None] = lambda step, optimizer: None,
) -> float:
    """The loss at the end of a training, the mean of what ranks have.

    Statistics of norms are each rank's own. `after` is called after each step.
    """
    work = build(task, dist.get_rank(), seed, rate, steps)
    assert work.evaluate is not None
    assert work.scheduler is not None
    model, optimizer = work.model, work.optimizer
    scheduler = work.scheduler(optimizer)
    sync = gradtide.replicate(model, optimizer, scheme)
    for step in range(steps):
        work.loss(model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        after(step, optimizer)
    sync.end_round()
    sync.flush()
    loss = torch.tensor(work.evaluate(model)["loss"], dtype=torch.float64)
    dist.all_reduce(loss)
    sync.remove()
    return float(loss) / dist.get_world_size()


def contest(
    ways: Iterable[str],
    train: Callable[[str, str, float, int], float],
    args: argparse.Namespace,
    seeds: int = 1,
    **how: Any,
) -> None:
    """Train on every rank, and have rank 0 write a record after each task.

    `train(task, way, rate, seed)` returns the loss at the end; `args` has `tasks`
    and `out`; `how` is said in the record. The first of `seeds` chooses the rate with
    which the others train, and `best` is the mean of all.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    record: dict[str, Any] = {
        "command": " ".join(["torchrun --nproc-per-node 4", *sys.argv]),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        **how,
        "seeds": seeds,
        "best": {},
        "runs": [],
    }

    def run(task: str, way: str, rate: float, seed: int) -> float:
        begin = time.perf_counter()
        loss = train(task, way, rate, seed)
        row = {"task": task, "way": way, "rate": rate, "seed": seed, "loss": loss}
        record["runs"].append(row)
        if dist.get_rank() == 0:
            print(row, f"{time.perf_counter() - begin:.0f} s", flush=True)
        return loss

    for task in args.tasks.split(","):
        known = TASKS[task].rates
        rates = [factor * known[len(known) // 2] for factor in FACTORS]
        for way in ways:
            ends = {rate: run(task, way, rate, 0) for rate in rates}
            best = min(rates, key=lambda rate: ends[rate])
            losses = [ends[best]]
            losses += [run(task, way, best, seed) for seed in range(1, seeds)]
            record["best"].setdefault(task, {})[way] = sum(losses) / seeds
            if dist.get_rank() == 0:
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()
