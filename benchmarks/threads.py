"""Readers beside training, under every recipe: run on each rank.

    torchrun --nproc-per-node 2 benchmarks/threads.py \
        --out benchmarks/records/threads_p2.json

Three threads read a small model while it is trained: one evaluates it, one saves copies
of its state, one traces it with torch.jit.trace. All go on from before the first step
to behind the last one. Of each recommended recipe, with a short warm-up, are reported
how often each has read, what it raised (nothing), how many tensors were torn, whether
ranks end alike (rounds are ended first), and of what is exact, whether training ends
with the bits of DistributedDataParallel, with nobody reading.

Torn tensors are told by parameters of which all elements begin alike and get the same
gradient: under SGD and an exact exchange they are alike in every state. What is saved
and has unlike elements was read in the middle of a write.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtide
from gradtide.lab.record import commit, machine, versions
from gradtide.scheme.recommended import RECOMMENDED

EXACT = ("wfbp", "dear")
WIDTH, DEPTH = 64, 4


class Even(nn.Module):
    """Adds a vector whose elements all get the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift.mean()


def model() -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), Even()]
    return nn.Sequential(*layers)


class Readers:
    """Threads that go on reading a model until `end`."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.done = net, threading.Event()
        self.reads, self.errors, self.torn = Counter[str](), Counter[str](), 0
        kinds: list[Callable[[], None]] = [self.evaluate, self.save, self.trace]
        self.threads = [threading.Thread(target=self.go_on, args=[k]) for k in kinds]
        for thread in self.threads:
            thread.start()

    def go_on(self, read: Callable[[], None]) -> None:
        while not self.done.is_set():
            try:
                read()
                self.reads[read.__name__] += 1
            except Exception as error:
                self.errors[f"{read.__name__}: {error}"[:200]] += 1

    def evaluate(self) -> None:
        with torch.no_grad():
            self.net(torch.ones(4, WIDTH))

    def save(self) -> None:
        saved = {name: value.clone() for name, value in self.net.state_dict().items()}
        for name, value in saved.items():
            if name.endswith("shift") and value.unique().numel() > 1:
                self.torn += 1

    def trace(self) -> None:
        trace: Any = torch.jit.trace
        trace(self.net, torch.ones(4, WIDTH), check_trace=False)

    def end(self) -> None:
        self.done.set()
        for thread in self.threads:
            thread.join()


def trained(recipe: str, steps: int, read: bool) -> dict[str, Any]:
    """Train by a recipe, or by DDP, perhaps with readers."""
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    forward: nn.Module = net
    sync = None
    if recipe == "ddp":
        forward = nn.parallel.DistributedDataParallel(net)
    else:
        sync = gradtide.replicate(net, opt, recipe)
    readers = Readers(net) if read else None
    try:
        for step in range(steps):
            rng = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            forward(torch.randn(16, WIDTH, generator=rng)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    finally:
        if readers is not None:
            readers.end()
    if sync is not None:
        sync.end_round()
        sync.remove()
    found: dict[str, Any] = {"bits": [p.tolist() for p in net.parameters()]}
    if readers is not None:
        found |= {"reads": dict(readers.reads), "errors": dict(readers.errors)}
        found |= {"torn": readers.torn}
    return found


def recipes() -> list[str]:
    short = [re.sub(r"warmup=\d+", "warmup=12", row.recipe) for row in RECOMMENDED]
    return list(dict.fromkeys([*EXACT, *short]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="*", help="recipes, in the place of all")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that what is read is not hidden, and of jit
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = trained("ddp", asked.steps, read=False)["bits"]
    rows = []
    for recipe in asked.only or recipes():
        own = trained(recipe, asked.steps, read=True)
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, own)
        exact = recipe in EXACT
        row = {
            "recipe": recipe,
            "reads": [one["reads"] for one in everybody],
            "errors": [one["errors"] for one in everybody],
            "torn": sum(one["torn"] for one in everybody) if exact else None,
            "alike": all(one["bits"] == own["bits"] for one in everybody),
            "bits of DDP": own["bits"] == reference if exact else None,
        }
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
    if rank == 0 and asked.out is not None:
        record = {
            "command": f"torchrun --nproc-per-node {size} {' '.join(sys.argv)}",
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "ranks": size,
            "steps": asked.steps,
            "rows": rows,
        }
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
