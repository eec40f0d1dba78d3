"""A rank raises the alarm for what it sends before its flow's first request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from tests.conftest import Product
from torch import Tensor

from gradtide.collectives import (
    COLLECTIVES,
    PARTITIONS,
    Dense,
    MomentumCorrection,
    Warmup,
)
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Collective, Payload
from gradtide.selectors import Exact, Threshold
from gradtide.testing import lockstep
from gradtide.wire.formats import BLOCK, FORMATS

SIZE = 3
LARGE = 120_000  # elements: what `CLTk` averages of them travels in two halves
TOO_LARGE = {"fp16": 1e8, "bf16": torch.finfo(torch.float32).max}


def collectives(wire: str | None) -> list[Any]:
    """All but the dense one, which leaves nothing behind."""
    found: list[Any] = []
    for kind in COLLECTIVES:
        make: Any = kind
        names = [field.name for field in fields(make)]
        if "select" in names:
            found += [make(0.05, select, wire) for select in (Exact(), Threshold())]
        elif "partition" in names:
            found += [make(0.05, partition(), wire) for partition in PARTITIONS]
        elif kind is not Dense and ("wire" in names or wire is None):
            found.append(make(wire=wire) if "wire" in names else make())
    return found


WRAPPED: dict[str, Callable[[Any], Collective]] = {
    "alone": lambda collective: collective,
    "warmup": lambda collective: Warmup(collective, steps=1),
    "corrected": lambda collective: MomentumCorrection(collective, clip=1e30),
    "both": lambda collective: Warmup(MomentumCorrection(collective), steps=1),
}


def noted(flow: Flow, payload: Payload, alarms: list[bool]) -> Flow:
    """The flow; `alarms` is told whether there was one before the first request."""
    asked = next(flow)
    alarms.append(math.isnan(payload.nonfinite))
    while True:
        try:
            asked = flow.send((yield asked))
        except StopIteration as stop:
            mean: Tensor = stop.value
            return mean


def step(collective: Collective, loads: list[Payload]) -> tuple[Tensor, list[bool]]:
    """The mean, and who had raised the alarm when it asked for something first."""
    alarms: list[bool] = []
    flows = [
        noted(collective.reduce(payload, Group(rank, SIZE)), payload, alarms)
        for rank, payload in enumerate(loads)
    ]
    means = lockstep(flows)
    for payload in loads:
        if payload.flat.data_ptr() == means[0].data_ptr():
            payload.flat.zero_()
    return means[0], alarms


def prepared(
    collective: Collective, numel: int, steps: int, weighed: bool = False
) -> list[Payload]:
    """Payloads that were averaged for some steps, with fresh gradients."""
    rng = torch.Generator().manual_seed(steps)
    loads: list[Payload] = []
    for _ in range(SIZE):
        flat = torch.zeros(numel)
        weigh = partial(_square, flat) if weighed else None
        parts = [flat[:-60].view(-1, 60), flat[-60:]]
        loads.append(Payload(flat, parts, weigh=weigh))
    for count in range(steps + 1):
        for payload in loads:
            payload.flat += torch.randn(numel, generator=rng)
        if count < steps:
            step(collective, loads)
    return loads


def _square(flat: Tensor, out: Tensor) -> None:
    out.copy_(flat).mul_(flat)


def later(loads: list[Payload]) -> list[bool]:
    return [math.isnan(payload.nonfinite) for payload in loads]


BAD = [(0, math.nan), (1, math.inf), (2, -math.inf)]  # on which rank, and what


@pytest.mark.parametrize("wrap", [*WRAPPED, "weighed"])
@pytest.mark.parametrize("inner", collectives(None), ids=repr)
def test_what_is_not_finite(inner: Collective, wrap: str, product: Product) -> None:
    weighed = wrap == "weighed"
    collective = inner if weighed else WRAPPED[wrap](inner)
    for (owner, bad), steps, place in product(BAD, (1, 2), (5, -5)):
        loads = prepared(collective, 3600, steps, weighed)
        loads[owner].flat[place] = bad
        _, alarms = step(collective, loads)
        told = [rank == owner for rank in range(SIZE)]
        assert alarms == told, "before the first request"
        assert later(loads) == told, "and nobody after it"


@pytest.mark.product
@pytest.mark.parametrize("wire", FORMATS)
def test_what_is_not_finite_on_a_wire_of_few_bits(wire: Any, product: Product) -> None:
    """What it shares a block with arrives as NaN; buffers stay finite."""
    every = [Dense(wire), *collectives(wire)]
    for inner, (owner, bad), place in product(every, BAD, (5, 1800, -5)):
        loads = prepared(inner, 3600, 1)
        loads[owner].flat[place] = bad
        mean, alarms = step(inner, loads)
        told = [rank == owner for rank in range(SIZE)]
        assert alarms == told, f"{inner}: before the first request"
        assert later(loads) == told, f"{inner}: and nobody after it"
        if isinstance(inner, Dense):
            assert not mean[place].isfinite()
            assert mean.isfinite().sum() >= 3600 - 2 * BLOCK
            assert all(load.flat.isfinite().all() for load in loads)


@pytest.mark.product(each=12)
@pytest.mark.parametrize("wire", TOO_LARGE)
def test_what_the_wire_makes_infinite(wire: str, product: Product) -> None:
    cases = product(collectives(wire), WRAPPED, range(SIZE))
    for inner, wrap, owner in cases:
        collective = WRAPPED[wrap](inner)
        loads = prepared(collective, LARGE, 1)
        loads[owner].flat.clamp_(-1, 1).mul_(TOO_LARGE[wire])
        _, alarms = step(collective, loads)
        told = [rank == owner for rank in range(SIZE)]
        assert alarms == told, f"{inner}, {wrap}: before the first request"
        assert later(loads) == told, f"{inner}, {wrap}: and nobody after it"
