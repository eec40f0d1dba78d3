"""Steps of four ranks over slow links: torch's DDP, and gradtide's recipes.

The lab's hosts have one rank each, and all ranks the one GPU, see [Note: One GPU]. So
what computing takes there is measured as well, and the limit is by that, by the bytes
and by the rate, as everywhere in the benchmarks (`gradtide.planner.clock.limits`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gpu.model import (
    ALONE,
    BYTES,
    GPT2,
    TINY,
    Entrant,
    Shape,
    adamw,
    loss_of,
    transformer,
)
from gpu.ranks import Groups, joined, told_each
from gpu.ranks import measure as measure_on_ranks
from gpu.results import Bar, Book
from gpu.setting import Setting
from gradtide.core.schedule import WFBP
from gradtide.lab.cluster import Cluster
from gradtide.lab.rate import format_rate
from gradtide.planner.clock.limits import limit_seconds

SPARSE = (
    "topka2a(0.02, schedule='local', wire='e3m0')",
    "exdyna(0.01, schedule='local', wire='e3m0')",
    "oktopk(0.01, schedule='local')",
)
FIRST = (ALONE, "gloo ddp", "gloo wfbp", "gloo wfbp(wire='e3m0')", "nccl ddp")
SECOND = (
    "gloo dear",
    *(f"gloo {recipe}" for recipe in SPARSE),
    "nccl ddp(wire='bf16')",
    "gloo dear(wire='bf16')",
    "gloo diloco(every=10)",
    "gloo sparseloco(every=10)",
    "nccl wfbp",
    "nccl dear(wire='bf16')",
    "gloo ddp(wire='bf16')",
)
STEPS = (4, 30)  # at least, and at most: whole rounds
SECONDS = 4.0  # of a contestant, about
LIMIT = 60.0


@dataclass(frozen=True)
class Trial:
    rate: float
    shape: Shape
    names: Sequence[str]

    def named(self, name: str) -> str:
        return f"{format_rate(self.rate)}, {name}"


# A dense exchange of four takes 1.2 s by the rate, or 0.6.
SLOW, FAST = Trial(1e9, BYTES, FIRST), Trial(1e10, GPT2, FIRST)
TRIALS = (SLOW, FAST, Trial(1e9, BYTES, SECOND), Trial(1e10, GPT2, SECOND[:1]))
ON_CPU = (Trial(2e8, TINY, [*FIRST[:3], SECOND[1]]),)
BARS = (
    Bar(
        "10gbit: wfbp's step, of DDP's over Gloo",
        FAST.named("gloo wfbp"),
        "seconds",
        1.05,
        per=(FAST.named("gloo ddp"),),
    ),
    Bar("10gbit: wfbp's step, of its limit", FAST.named("gloo wfbp"), "of limit", 1.15),
    Bar(
        "1gbit: wfbp's step, of DDP's over Gloo",
        SLOW.named("gloo wfbp"),
        "seconds",
        1.05,
        per=(SLOW.named("gloo ddp"),),
    ),
    Bar(
        "1gbit: e3m0's step, of DDP's at its best",
        SLOW.named("gloo wfbp(wire='e3m0')"),
        "seconds",
        0.25,
        per=(SLOW.named("gloo ddp"), SLOW.named("nccl ddp")),
    ),
)


def measure(book: Book, setting: Setting) -> None:
    for trial in TRIALS if setting.cuda else ON_CPU:
        size = 4 if setting.cuda else 2
        names = [trial.named(name) for name in trial.names]
        cluster = Cluster(size, rate=trial.rate)
        known = book.values
        measure_on_ranks(book, cluster, train, names, setting, trial, known)


# - On every rank ----------------------------------------------------------------------


def train(
    names: Sequence[str], setting: Setting, trial: Trial, known: Mapping[str, Any]
) -> None:
    known = dict(known)
    with joined(setting, 60) as groups:

        def call(name: str) -> dict[str, Any]:
            known[name] = found = timed(
                setting, groups, trial, name.partition(", ")[2], known
            )
            return found

        told_each(groups, names, call, LIMIT)


def timed(
    setting: Setting,
    groups: Groups,
    trial: Trial,
    name: str,
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """Seconds of a step, the mean over some of them; how many, the first ones say."""
    model = transformer(setting, trial.shape)
    optimizer = adamw(setting, model)
    rng = torch.Generator().manual_seed(1 + groups.rank)
    rows = 2 if setting.tiny else 8
    tokens = torch.randint(
        trial.shape.vocabulary, (rows, 257 if setting.cuda else 33), generator=rng
    ).to(setting.device)
    if name == ALONE:
        return computing(setting, groups, model, optimizer, tokens)
    transport, _, scheme = name.partition(" ")
    entrant = Entrant(scheme, model, optimizer, groups.of(transport))
    schedule = WFBP if entrant.replica is None else entrant.replica.scheme.schedule
    entrant.step(tokens)
    first = seconds(setting, groups, entrant, tokens, schedule.every)
    budget = 1.0 if setting.tiny else SECONDS
    count = max(STEPS[0], min(STEPS[1], int(budget / first)))
    count = -(-count // schedule.every) * schedule.every
    entrant.sent_bytes(0, groups.size)
    found: dict[str, Any] = {
        "seconds": seconds(setting, groups, entrant, tokens, count)
    }
    sent = entrant.sent_bytes(count, groups.size) / count
    found |= {"steps": count, "MB": sent / 1e6}
    alone = known.get(trial.named(ALONE))
    if alone and schedule == WFBP:
        wire = (8 * sent / trial.rate, 0.0)
        limit = limit_seconds(alone["forward"], alone["backward"], wire, WFBP)
        # What the optimizer takes comes on top, whoever exchanges.
        found["of limit"] = found["seconds"] / (limit + alone["apply"])
    entrant.leave()
    return found


def seconds(
    setting: Setting, groups: Groups, entrant: Entrant, tokens: torch.Tensor, count: int
) -> float:
    """Of one of so many steps, by the slowest rank."""
    setting.synchronize()
    dist.barrier(groups.gloo)
    start = time.perf_counter()
    for _ in range(count):
        entrant.step(tokens)
    entrant.flush()
    setting.synchronize()
    took = torch.tensor((time.perf_counter() - start) / count)
    dist.all_reduce(took, dist.ReduceOp.MAX, group=groups.gloo)
    return float(took)


def computing(
    setting: Setting,
    groups: Groups,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
) -> dict[str, Any]:
    """Seconds of forward, backward and optimizer while all ranks compute, too."""
    parts = dict.fromkeys(("forward", "backward", "apply"), 0.0)
    count = 4
    for step in range(-2, count):
        dist.barrier(groups.gloo)
        clocks = [time.perf_counter()]

        def clock(clocks: list[float] = clocks) -> None:
            setting.synchronize()
            clocks.append(time.perf_counter())

        loss = loss_of(model, tokens)
        clock()
        loss.backward()  # type: ignore[no-untyped-call]
        clock()
        optimizer.step()
        optimizer.zero_grad()
        clock()
        for i, part in enumerate(parts):
            parts[part] += (clocks[i + 1] - clocks[i]) / count if step >= 0 else 0.0
    return {"seconds": sum(parts.values()), **parts}
