"""Freezing, thawing and switching adapters under every recipe: run on each rank.

    torchrun --nproc-per-node 2 benchmarks/frozen.py \
        --out benchmarks/records/frozen_p2.json

Two programs, each under all recommended recipes (with warm-ups of 12 steps), some
others and rounds. In both a base is trained with two adapters, then frozen by
requires_grad_(False) while one adapter is active and the other is left out of forward,
then the adapters are switched, and in the end all of it is trained again.

`net` trains linear layers with adapters of low rank by AdamW with weight decay.
Reported are the steps after which anything changed that no rank trained, of all that
are frozen or left out (none: "moved" is 0); whether ranks end alike; and, of recipes
that are exact, whether they end with the bits of DistributedDataParallel.

`law` has gradients that depend on nothing but the step, and SGD, so it is known where
every parameter has to end once all has been delivered, what waited included: at its
start minus the mean over ranks of the sum of all gradients. A dense scheme takes over
in the end and delivers what is left. Reported is the largest distance from there, over
the largest way of any element. K-FAC and auto, which are no linear functions of
gradients, and what is made to forget, are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradtide
from gradtide.collectives import Dense
from gradtide.lab.record import commit, machine, versions
from gradtide.scheme import Scheme, parse, undecided
from gradtide.scheme.recommended import RECOMMENDED

ROUNDS = ("local_sgd(every=5)", "diloco(every=5)", "sparseloco(every=5)")
LATE = "streaming_diloco(every=6, delay=1, fragments=2)"
OTHERS = ("wfbp(wire='e3m0')", "dear(wire='sign')", "topk(0.02, schedule='dear')")
CORRECTED = "topk(0.02, momentum_correction=True)"
EXACT = ("wfbp", "dear")
WIDTH, RANK = 48, 4
ALL, FIRST, SECOND, AGAIN = 24, 100, 100, 24  # steps of each phase


def recipes() -> list[str]:
    """What is tried, with warm-ups of a few steps."""
    told = [row.recipe for row in RECOMMENDED]
    short = [re.sub(r"warmup=\d+", "warmup=12", recipe) for recipe in told]
    return [*short, *OTHERS, CORRECTED, *ROUNDS, LATE]


@dataclass(frozen=True)
class Phase:
    """What is trained: the base, or one adapter by its number, or all (None)."""

    adapter: int | None
    steps: int


PHASES = Phase(None, ALL), Phase(0, FIRST), Phase(1, SECOND), Phase(None, AGAIN)


class Adapted(nn.Module):
    """A linear layer with two adapters of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.ModuleList(nn.Linear(WIDTH, RANK, bias=False) for _ in "ab")
        self.up = nn.ModuleList(nn.Linear(RANK, WIDTH, bias=False) for _ in "ab")

    def forward(self, x: Tensor, adapter: int | None) -> Tensor:
        active = (0, 1) if adapter is None else (adapter,)
        found: Tensor = self.base(x)
        for i in active:
            found = found + self.up[i](self.down[i](x))
        return found.relu()


class Net(nn.Module):
    """Two of them, and a head that is always trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, adapter: int | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, adapter)
        found: Tensor = self.head(x)
        return found


class Sums(nn.Module):
    """The same parameters; the loss is their sum, weighted by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, weights: dict[str, Tensor], adapter: int | None) -> Tensor:
        used = is_trained(adapter)
        named = self.net.named_parameters()
        terms = [(p * weights[n]).sum() for n, p in named if used(n)]
        return torch.stack(terms).sum()


def is_trained(adapter: int | None) -> Any:
    """Whether a parameter is, by its name, while an adapter is active."""

    def answer(name: str) -> bool:
        if adapter is None or name.startswith("head"):
            return True
        return f"down.{adapter}" in name or f"up.{adapter}" in name

    return answer


def steps_of_phases() -> Iterator[tuple[int, Phase, int]]:
    """The number of a step, its phase, and its number in it."""
    number = 0
    for phase in PHASES:
        for within in range(phase.steps):
            yield number, phase, within
            number += 1


def freeze(net: nn.Module, adapter: int | None) -> None:
    """Have the base require gradients if all of it is trained."""
    for name, p in net.named_parameters():
        p.requires_grad_(adapter is None or "base" not in name)


def settled(scheme: Scheme) -> int:
    """After how many steps of a phase the round is over in which it began."""
    schedule = scheme.schedule
    rest = sum(phase.steps for phase in PHASES[:1]) % schedule.every
    return (schedule.every - rest) % schedule.every + schedule.every + schedule.delay


def net_program(recipe: str) -> dict[str, Any]:
    """Really train; see this module's documentation."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.1)
    model: nn.Module = net
    if recipe == "ddp":
        model = DistributedDataParallel(net, find_unused_parameters=True)
    else:
        sync = gradtide.replicate(net, optimizer, recipe)
    moved: dict[str, int] = {}
    known = settled(Scheme() if recipe == "ddp" else sync.scheme)
    for number, phase, within in steps_of_phases():
        if within == 0:
            freeze(net, phase.adapter)
        trained = is_trained(phase.adapter)
        idle = {n: p for n, p in net.named_parameters() if not trained(n)}
        before = {name: p.detach().clone() for name, p in idle.items()}
        rng = torch.Generator().manual_seed(97 * number + dist.get_rank())
        x = torch.randn(16, WIDTH, generator=rng)
        y = torch.randint(0, 4, (16,), generator=rng)
        F.cross_entropy(model(x, phase.adapter), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        for name, p in idle.items():
            in_round = known > 1 and within < known
            if not in_round and not torch.equal(before[name], p):
                moved[name] = moved.get(name, 0) + 1
    if recipe != "ddp":
        sync.remove()
    ends = torch.cat([p.detach().flatten() for p in net.parameters()])
    return {"moved": sum(moved.values()), "by_name": moved, "ends": ends}


def whole(scheme: Scheme) -> Scheme:
    """A dense scheme that delivers what another has left."""
    schedule = scheme.schedule
    if schedule.launch == "step":
        return Scheme(Dense(), schedule=schedule, outer=scheme.outer)
    return Scheme()


def law_program(recipe: str) -> float | None:
    """How far parameters end from where they have to; see this module's text."""
    recipe = re.sub(r", warmup=\d+|, momentum_correction=True", "", recipe)
    scheme = parse(recipe)
    odd = scheme.preconditioner is not None or scheme.outer is not None
    forgetful = scheme.schedule.decay != 1 or scheme.schedule.mix is not None
    if odd or forgetful or undecided(scheme) is not None:
        return None
    torch.manual_seed(0)
    model = Sums()
    start = {n: p.detach().clone() for n, p in model.net.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    sync = gradtide.replicate(model, optimizer, scheme)
    sums = {name: torch.zeros_like(p) for name, p in start.items()}

    def step(number: int, adapter: int | None) -> None:
        rng = torch.Generator().manual_seed(89 * number + dist.get_rank())
        weights = {
            name: torch.randint(-8, 9, p.shape, generator=rng).float()
            for name, p in start.items()
        }
        model(weights, adapter).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name in filter(is_trained(adapter), sums):
            sums[name] += weights[name]

    for number, phase, within in steps_of_phases():
        if within == 0:
            freeze(model.net, phase.adapter)
        step(number, phase.adapter)
    sync.end_round()
    sync.adopt(whole(scheme))
    step(10**6, None)
    sync.end_round()
    sync.remove()
    furthest, longest = 0.0, 0.0
    for name, p in model.net.named_parameters():
        dist.all_reduce(sums[name])
        way = scheme.schedule.gain * sums[name] / dist.get_world_size()
        off = (start[name] - way - p.detach()).abs().max()
        furthest, longest = (
            max(furthest, float(off)),
            max(longest, float(way.abs().max())),
        )
    return furthest / longest


def alike(ends: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    everywhere = [torch.empty_like(ends) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, ends)
    return all(torch.equal(ends, other) for other in everywhere)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="recipes that have this in them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    ddp = net_program("ddp")
    found = {}
    for recipe in recipes():
        if args.only and args.only not in recipe:
            continue
        net = net_program(recipe)
        ends = net.pop("ends")
        found[recipe] = {
            **net,
            "alike": alike(ends),
            "law": law_program(recipe),
            **({"as_ddp": torch.equal(ends, ddp["ends"])} if recipe in EXACT else {}),
        }
        if dist.get_rank() == 0:
            print(recipe, json.dumps(found[recipe]), flush=True)
    size = dist.get_world_size()
    record = {
        "command": f"torchrun --nproc-per-node {size} benchmarks/frozen.py",
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "ranks": size,
        "frozen_steps": FIRST + SECOND,
        "moved": sum(each["moved"] for each in found.values()),
        "moved_under_ddp": ddp["moved"],
        "recipes": found,
    }
    if dist.get_rank() == 0 and args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
