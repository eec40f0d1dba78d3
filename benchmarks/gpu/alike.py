"""Streams and lifetimes: every recipe has the same bits, however the device is driven.

Each trains some steps in three ways: as it is; with every launch blocking, so that
nothing can be out of order; and with delays on the device, in backward and before the
step, longer on every second rank: the device is then far behind the host, and what is
not ordered shows. All ranks, in all three ways, have to end with one digest.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast

import torch
from torch import nn

import gradtide
from gpu.ranks import Groups, joined, told_each
from gpu.ranks import measure as measure_on_ranks
from gpu.results import Book, right
from gpu.setting import Setting
from gradtide.lab.cluster import Cluster
from gradtide.lab.job import from_everybody
from gradtide.scheme.recipes import SPARSE
from gradtide.scheme.recommended import RECOMMENDED

STEPS = 8
LIMIT = 45.0  # seconds of one training
PLAIN, BLOCKING, DELAYED = WAYS = ("plain", "blocking", "delayed")
CYCLES = 2_000_000  # of a delay: a millisecond
SYNC_BATCH_NORM = "SyncBatchNorm beside wfbp"


def shortened(recipe: str) -> str:
    """With a warm-up, and stages of K-FAC, that some steps go through."""
    recipe = re.sub(r"warmup=\d+", "warmup=6", recipe)
    recipe = re.sub(r"factor_every=\d+", "factor_every=1", recipe)
    return re.sub(r"inverse_every=\d+", "inverse_every=2", recipe)


def dense_enough(name: str) -> str:
    """A sparse recipe that has some entries of a small model to send."""
    names = [field.name for field in fields(cast(Any, SPARSE[name]()))]
    return f"{name}(0.05)" if names[0] == "density" else name


# `auto` decides by the clock: two of its runs need not have the same bits.
FIRST = [shortened(row.recipe) for row in RECOMMENDED if row.recipe != "auto"]
OTHERS = [
    *map(dense_enough, SPARSE),
    *(f"dear(wire='{wire}')" for wire in ("fp16", "e3m0", "2bit", "sign")),
    "sequential",
    "topka2a(0.05, schedule='dear')",
    "topka2a(0.05, momentum_correction=True)",
    "local_sgd(every=3)",
    "diloco(every=3)",
    "streaming_diloco(every=6, delay=1)",
    "sparseloco(every=3)",
    *(f"{name}_kfac(inverse_every=2)" for name in ("mpd", "spd", "dp")),
]
LEVELS = ["wfbp(levels=2)", "dear(levels=2)", "oktopk(0.05, levels=2)"]


@dataclass(frozen=True)
class Trial:
    """So many ranks that exchange in one way, and what they train with."""

    transport: str
    size: int
    recipes: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.transport}, {self.size} ranks"

    def named(self, recipe: str) -> str:
        return f"{self.name}: {recipe}"


# The first of each come first; three ranks share nothing out in equal parts.
TRIALS = (
    Trial("nccl", 2, [*FIRST, SYNC_BATCH_NORM]),
    Trial("gloo", 4, [*FIRST, *LEVELS]),
    Trial("nccl", 2, OTHERS),
    Trial("gloo", 4, OTHERS),
    Trial("nccl", 3, FIRST[:2] + OTHERS[:6]),
)
ON_CPU = (Trial("gloo", 2, [*FIRST[:1], *FIRST[3:6:2]]),)
BARS = tuple(
    right(f"{name}: one digest", name, "alike")
    for name in dict.fromkeys(trial.name for trial in TRIALS)
)


def measure(book: Book, setting: Setting) -> None:
    trials = TRIALS if setting.cuda else ON_CPU
    for trial in trials:
        _in_all_ways(book, setting, trial)
        names = [t.named(r) for t in trials if t.name == trial.name for r in t.recipes]
        found = {name: v for name, v in book.values.items() if name in names}
        wrong = [name for name, value in found.items() if not value["alike"]]
        if wrong or len(found) == len(names):
            told = {"alike": not wrong, "recipes": len(found), "wrong": wrong}
            book.put(trial.name, told)
    if not setting.cuda:
        book.skip([SYNC_BATCH_NORM], "needs CUDA devices and NCCL")


def _in_all_ways(book: Book, setting: Setting, trial: Trial) -> None:
    """The three ways at once: no time is taken here."""
    left = set(book.left(map(trial.named, trial.recipes)))
    recipes = [r for r in trial.recipes if trial.named(r) in left]
    if not recipes:
        return
    together = Together(book, trial)

    def run(way: str) -> None:
        ledger = together.of(way)
        arguments = setting, trial.transport, way
        measure_on_ranks(ledger, Cluster(trial.size), train, recipes, *arguments)

    with ThreadPoolExecutor(len(WAYS)) as threads:
        list(threads.map(run, WAYS))


class Together:
    """What the ways have found of each recipe; the last one writes the figure."""

    def __init__(self, book: Book, trial: Trial) -> None:
        self._book, self._trial = book, trial
        self._lock = threading.Lock()
        self._found: dict[str, dict[str, Any]] = {}

    def of(self, way: str) -> Way:
        return Way(self, way)

    def begin(self, recipe: str) -> None:
        with self._lock:
            if recipe not in self._found:
                self._found[recipe] = {}
                self._book.begin(self._trial.named(recipe))

    def put(self, recipe: str, way: str, value: Any) -> None:
        with self._lock:
            row = self._found.setdefault(recipe, {})
            row[way] = value
            if len(row) < len(WAYS):
                return
            name = self._trial.named(recipe)
            failures = [f"{w}: {v}" for w, v in row.items() if isinstance(v, str)]
            if failures:
                self._book.fail(name, " / ".join(failures))
                return
            alike = len({digest for digests in row.values() for digest in digests}) == 1
            self._book.put(name, {"alike": alike, **({} if alike else row)})


class Way:
    """The ledger of one of the ways; a text stands for a failure."""

    def __init__(self, together: Together, way: str) -> None:
        self._together, self._way = together, way
        self._there = set[str]()

    def left(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self._there]

    def begin(self, name: str) -> None:
        self._together.begin(name)

    def put(self, name: str, value: Any) -> None:
        self._there.add(name)
        self._together.put(name, self._way, value)

    def fail(self, name: str, why: str) -> None:
        self.put(name, why)


# - On every rank ----------------------------------------------------------------------


def train(recipes: Sequence[str], setting: Setting, transport: str, way: str) -> None:
    if way == BLOCKING:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # CUDA reads it when it begins
    with joined(setting) as groups:
        work = partial(digests, setting, groups, transport, way)
        told_each(groups, recipes, work, LIMIT)


def digests(
    setting: Setting, groups: Groups, transport: str, way: str, recipe: str
) -> list[str]:
    """Of what all ranks agree on after some steps, rank by rank.

    Statistics of norms are not of that: the next forward begins with rank 0's.
    """
    torch.manual_seed(0)
    width = 64 if setting.tiny else 1024
    model: nn.Module = network(width)
    if recipe == SYNC_BATCH_NORM:
        group = groups.of(transport)
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        model = convert(model, group)
        recipe = "wfbp"
    model.to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=setting.cuda)
    if way == DELAYED:
        hold_up(setting, groups.rank, model, optimizer)
    sync = gradtide.replicate(
        model, optimizer, recipe, process_group=groups.of(transport)
    )
    rng = torch.Generator(setting.device).manual_seed(1 + groups.rank)
    for _ in range(STEPS):  # without a copy from the host, which would wait
        x = torch.randn(16, width // 4, generator=rng, device=setting.device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.flush()
    sync.end_round()
    with sync.shared_parameters():
        agreed = [p.detach().cpu().view(torch.uint8) for p in model.parameters()]
    sync.remove()
    bits = b"".join(each.numpy().tobytes() for each in agreed)
    return from_everybody(hashlib.sha1(bits).hexdigest()[:12])


def network(width: int) -> nn.Module:
    """14 MB, and no kernel of it that adds up in an order of chance."""
    return nn.Sequential(
        nn.Linear(width // 4, width), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(),
        nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, width // 8),
    )  # fmt: skip


def hold_up(
    setting: Setting, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Delays on the device; on a CPU, of the program."""

    def delay(times: int) -> None:
        if setting.cuda:
            torch.cuda._sleep(times * (1 + rank % 2) * CYCLES)  # type: ignore[no-untyped-call]
        else:
            time.sleep(1e-4 * times)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(lambda *_: delay(1))
    optimizer.register_step_pre_hook(lambda *_: delay(4))
