"""The conservation law, with data that make ranks and the places of a host differ.

    python benchmarks/law.py --out benchmarks/records/law_202611.json
    torchrun --nproc-per-node 6 benchmarks/law.py --hosts 3 \
        --out benchmarks/records/law_oktopk_3x2_202611.json

The first, in lockstep: every collective, on every wire, among 1 to 16 ranks and on
hosts of several ranks, with every kind of data (`gradtide.testing.SCALES`), for 2 to 14
steps each, the more the fewer ranks there are. After every exchange all ranks hold the
same bits, what was there is what was delivered and what is left, and nobody asked for
what those whom it was asked did not. In every fourth case buckets are in half
precision, where bits are compared alone. Densities, selectors, lengths and numbers are
drawn, by `--seed`.

The second, on real ranks, which are told that they are on so many hosts: `oktopk`
with experts that shift, under two schedules. What all ranks have delivered and what is
left is the sum of all gradients, replicas are alike, and places of a host have asked
for different numbers of things.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtide
from gradtide.collectives import COLLECTIVES, PARTITIONS, Dense, PartitionedTopK, Warmup
from gradtide.collectives.levels import by_levels
from gradtide.core.ops import Group
from gradtide.core.payload import Collective
from gradtide.lab.record import origin
from gradtide.scheme import parse
from gradtide.selectors import Exact, Threshold
from gradtide.testing import SCALES, DivergedError, check_law
from gradtide.wire import CASTS, WIRES

SIZES = (1, 2, 3, 4, 5, 7, 8, 16)
CLUSTERS = ((2, 2), (3, 2), (2, 3), (4, 2), (2, 4), (4, 4))  # hosts x ranks of each
LENGTHS = (48, 240, 336)  # elements for every rank
HALF = (torch.float16, torch.bfloat16)
COLUMNS = 24  # of the matrix that is the first half of a bucket


@dataclass(frozen=True)
class Case:
    """A collective among some ranks, on hosts of so many, with one kind of data."""

    number: int
    collective: Collective
    size: int
    local: int
    data: str

    def check(self, steps: int, seed: int) -> None:
        """Exchange so many times; raises AssertionError or DivergedError."""
        draw = Random(f"{seed} {self.number}")
        rng = torch.Generator().manual_seed(draw.getrandbits(60))
        half = self.number % 4 == 3
        magnitude = 1e-2 if half else 1.0

        def gradient(_: torch.Generator, n: int) -> Tensor:
            return torch.randn(n, generator=rng).pow_(3).mul_(magnitude)

        collective, length = drawn(self.collective, draw), draw.choice(LENGTHS)
        if getattr(collective, "wire", None) in CASTS:
            # What would travel densely would lose what is rounded off.
            length = max(LENGTHS)
            collective = self.collective
        check_law(
            by_levels(collective, self.local),
            self.size,
            numel=length * self.size,
            steps=0,
            dtype=draw.choice(HALF) if half else torch.float64,
            tolerance=math.inf if half else 1e-9,
            gradient=gradient,
            scales=[SCALES[self.data]] * steps,
            parts=tensors,
        )


def tensors(flat: Tensor) -> Sequence[Tensor]:
    """A matrix, and two vectors behind it."""
    middle, end = len(flat) // 2, len(flat) * 3 // 4
    return [flat[:middle].view(-1, COLUMNS), flat[middle:end], flat[end:]]


def sparse(collective: Any) -> Collective:
    """The collective, with enough entries to send and not too many."""
    has_density = "density" in collective.__dataclass_fields__
    found = replace(collective, density=0.05) if has_density else collective
    return found  # type: ignore[no-any-return]


def drawn(collective: Any, draw: Random) -> Collective:
    """The collective with another density, and another selector."""
    options: dict[str, Any] = {
        "density": draw.choice((0.02, 0.05, 0.2)),
        "select": draw.choice((Exact(), Threshold())),
    }
    known = collective.__dataclass_fields__.keys() & options.keys()
    found: Collective = replace(collective, **{key: options[key] for key in known})
    return found


def collectives() -> Iterator[Collective]:
    """All of them on every wire that loses nothing."""
    make: Any
    for make in COLLECTIVES:
        has_wire = "wire" in make.__dataclass_fields__
        wires: Sequence[Any] = (None, *WIRES) if has_wire else (None,)
        for wire in wires:
            if make is PartitionedTopK:
                for partition in PARTITIONS:
                    yield PartitionedTopK(partition=partition(), wire=wire)
            elif make is not Dense or wire not in CASTS:
                yield sparse(make() if wire is None else make(wire=wire))
    yield Warmup(gradtide.OkTopk(), 3, (0.3, 0.1))
    yield Warmup(gradtide.TopKA2A(wire="int8"), 4)


def cases() -> Iterator[Case]:
    flat = [(size, 1) for size in SIZES]
    places = [*flat, *((hosts * local, local) for hosts, local in CLUSTERS)]
    found = product(collectives(), places, SCALES)
    for number, (collective, (size, local), data) in zip(count(), found, strict=False):
        yield Case(number, collective, size, local, data)


def in_lockstep(flows: int, seed: int, only: str) -> dict[str, Any]:
    """Check all cases, or those that have `only` in their words."""
    start, failures = time.perf_counter(), []
    exchanges: Counter[str] = Counter()
    for case in cases():
        if only not in str(case):
            continue
        steps = max(2, min(14, flows // case.size))
        exchanges[type(case.collective).__name__] += steps
        try:
            case.check(steps, seed)
        except (AssertionError, DivergedError, RuntimeError) as error:
            failures.append({"case": str(case), "error": str(error)})
            print(failures[-1], flush=True)
    return {
        "seed": seed,
        "flows_of_a_case": flows,
        "exchanges": exchanges.total(),
        "failures": failures,
        "seconds": round(time.perf_counter() - start, 1),
        "exchanges_of": exchanges,
    }


# - Real ranks -------------------------------------------------------------------------


def on_hosts(schedule: str, local: int, steps: int, seed: int) -> dict[str, Any]:
    """Train for some steps; what became of the gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = 1200 * size
    model = nn.ParameterList(
        torch.zeros(numel // 2, dtype=torch.float64) for _ in range(2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wanted = parse(f"oktopk(0.02, schedule='{schedule}')")
    wanted = replace(wanted, levels=local)
    sync = gradtide.replicate(model, optimizer, wanted)
    rng = torch.Generator().manual_seed(1000 * seed + rank)
    total = torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        scale = torch.as_tensor(SCALES["experts"](step, Group(rank, size), numel))
        gradient = torch.randn(numel, generator=rng).pow_(3).mul_(scale).double()
        total += gradient
        loss = sum((p * g).sum() for p, g in zip(model, gradient.chunk(2), strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.flush()
    asked = len([r for r in sync.engine.telemetry.records if not r.inside])
    left = sync.state_dict()[f"rank{rank}"]["remainders"]
    residual = torch.cat([left[name] for name, _ in model.named_parameters()])
    moved = -torch.cat([p.detach() for p in model])
    sync.remove()
    everywhere = [torch.empty_like(moved) for _ in range(size)]
    dist.all_gather(everywhere, moved)
    for sum_of_ranks in (total, residual):
        dist.all_reduce(sum_of_ranks)
    numbers: list[int] = [0] * size
    dist.all_gather_object(numbers, asked)
    off = (total - size * moved - residual).abs().max() / total.abs().max()
    return {
        "alike": all(torch.equal(moved, other) for other in everywhere),
        "neither_delivered_nor_left": float(off),
        "requests_between_hosts": numbers,
    }


def on_real_ranks(hosts: int, steps: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    start, local = time.perf_counter(), size // hosts
    found = {s: on_hosts(s, local, steps, seed) for s in ("wfbp", "dear")}
    return {
        "hosts": hosts,
        "ranks_of_a_host": local,
        "steps": steps,
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "schedules": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flows", type=int, default=40, help="of a case, about")
    parser.add_argument("--steps", type=int, default=500, help="on real ranks")
    parser.add_argument("--only", default="", help="cases that have this in them")
    parser.add_argument("--hosts", type=int, help="on real ranks: how many to pretend")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.hosts:
        found = on_real_ranks(args.hosts, args.steps, args.seed)
    else:
        torch.set_num_threads(1)
        found = in_lockstep(args.flows, args.seed, args.only)
    if os.environ.get("RANK", "0") == "0":
        ranks = os.environ.get("WORLD_SIZE")
        start = f"torchrun --nproc-per-node {ranks}" if ranks else "python"
        command = " ".join([start, *sys.argv])
        about = {**origin(sys.argv), "command": command}
        record = json.dumps({**about, **found}, indent=2)
        print(record)
        if args.out:
            args.out.write_text(record + "\n")
    if args.hosts:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
