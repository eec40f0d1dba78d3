"""Flows without a network: what they ask for and do, noted while they run.

Flows whose requests depend on shapes alone run on tensors without memory, others on
random gradients.

[Note: Peers] Up to LOCKSTEP ranks all flows run, as in `gradtide.testing`; beyond, one
does, and the others' answers are reflections (`answers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradtide.bucket import Payload, traits
from gradtide.ops import Cut, Flow, Group, Op, ToHost, payload_bytes
from gradtide.plan.answers import reflected, shaped
from gradtide.plan.labour import Counter, Idle, Work
from gradtide.plan.sketch import Request, sketched
from gradtide.testing import answer

LOCKSTEP = 8  # ranks up to which all flows run
STEPS = 3  # that are rehearsed: the first is unlike the others, which may alternate
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class Noted(NamedTuple):
    """One exchange: work and the requests that follow it, and the work at its end.

    Of the first one the work is not counted: it is unlike that of all others, and to
    count takes as long as to run.
    """

    asked: list[tuple[Work, tuple[Request, ...]]]
    work: Work


@dataclass(frozen=True)
class Sharp:
    """Exactly the k largest, for want of noise: stands for any selector."""

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        if k >= x.numel():
            return torch.arange(x.numel(), dtype=torch.int32)
        # Partitioned in a fifth of torch.topk's time, and not counted as work.
        sizes = np.abs(x.float().numpy())
        found = np.argpartition(sizes, x.numel() - max(k, 1))[-max(k, 1) :]
        found.sort()
        return torch.from_numpy(found.astype(np.int32))


@lru_cache(maxsize=512)
def by_shapes(
    collective: Any, numel: int, dtype: torch.dtype, shapes: Shapes, size: int
) -> list[Noted]:
    """A flow on tensors without memory."""
    group = Group(0, size)
    flat = torch.empty(numel, dtype=dtype, device="meta")
    parts, begin = [], 0
    for shape in shapes:
        n = torch.Size(shape).numel()
        parts.append(flat[begin : begin + n].view(shape))
        begin += -(-n // size) * size
    load, steps = Payload(flat, parts or [flat]), []
    with _believing():
        for step in range(STEPS):
            load.flat, load.alarm = flat, 0.0
            flow, counter = collective.reduce(load, group), _counter(step == 0)
            reply = partial(shaped, group=group)
            steps.append(_noted(flow, group, reply, counter)[0])
    return steps


class _Believe(TorchFunctionMode):
    """Numbers that are not there are all that is hoped for: finite."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0].device.type == "meta":
            return True
        return func(*args, **(kwargs or {}))


@contextmanager
def _believing() -> Iterator[None]:
    with torch.no_grad(), _Believe():
        yield


@lru_cache(maxsize=512)
def by_numbers(
    collective: Any, numel: int, dtype: torch.dtype, size: int
) -> list[Noted]:
    """Flows on random gradients: all ranks', or one rank's."""
    names = {f.name for f in fields(collective)}
    sharp = replace(collective, select=Sharp()) if "select" in names else collective
    everybody = size <= LOCKSTEP
    ranks = range(size if everybody else 1)
    draws = [torch.Generator().manual_seed(1 + rank) for rank in ranks]
    flats = [torch.zeros(numel, dtype=dtype) for _ in ranks]
    loads = [Payload(flat, [flat]) for flat in flats]
    steps = []
    with torch.no_grad():
        for step in range(2):
            counter = _counter(step == 0)
            for draw, flat in zip(draws, flats, strict=True):
                fresh = torch.randn(numel, generator=draw, dtype=torch.float32)
                flat += fresh.pow_(3).to(dtype)
            flows = [
                sharp.reduce(load, Group(rank, size))
                for rank, load in zip(ranks, loads, strict=True)
            ]
            if everybody:
                noted, means = _together(flows, counter)
            else:
                noted, means = _alone(flows[0], sharp, size, counter)
            steps.append(noted)
            for flat, mean in zip(flats, means, strict=True):
                if flat.data_ptr() == mean.data_ptr():
                    flat.zero_()
    return steps


def _together(
    flows: Sequence[Flow], counter: Counter | Idle
) -> tuple[Noted, list[Tensor]]:
    """All ranks in lockstep; of each request that of the rank that sends most."""
    noted: list[tuple[Work, tuple[Request, ...]]] = []
    size, work = len(flows), Work()
    answers: list[Any] = [None] * size
    while True:
        asked: list[Any] = []
        means: list[Tensor] = []
        with counter:
            for flow, one in zip(flows, answers, strict=True):
                try:
                    asked.append(flow.send(one))
                except StopIteration as stop:
                    means.append(stop.value)
        work = work.plus(counter.read(size))
        if means:
            return Noted(noted, work), means
        columns = list(zip(*map(_several, asked), strict=True))
        if not isinstance(columns[0][0], ToHost):
            noted.append((work, tuple(map(_busiest, columns))))
            work = Work()
        rows = list(zip(*(answer(ops) for ops in columns), strict=True))
        together = isinstance(asked[0], tuple)
        answers = [row if together else row[0] for row in rows]


def _busiest(ops: Sequence[Op]) -> Request:
    size = len(ops)
    sent = [payload_bytes(op, Group(rank, size)) for rank, op in enumerate(ops)]
    rank = sent.index(max(sent))
    return sketched(ops[rank], Group(rank, size))


def _alone(
    flow: Flow, collective: Any, size: int, counter: Counter | Idle
) -> tuple[Noted, list[Tensor]]:
    group = Group(0, size)
    try:
        reply = partial(reflected, group=group, alike=traits(collective).alike)
        noted, mean = _noted(flow, group, reply, counter)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"{collective!r} cannot be rehearsed among {size} ranks, with answers made "
            f"up for all but one ({error}): simulate it among up to {LOCKSTEP}"
        ) from error
    return noted, [mean]


def _noted(
    flow: Flow, group: Group, reply: Callable[[Op], Any], counter: Counter | Idle
) -> tuple[Noted, Tensor]:
    """What one flow asks for, which gets replies, and the mean that it returns."""
    noted: list[tuple[Work, tuple[Request, ...]]] = []
    work = Work()
    answered: Any = None
    while True:
        try:
            with counter:
                asked = flow.send(answered)
        except StopIteration as stop:
            return Noted(noted, work.plus(counter.read())), stop.value
        ops, work = _several(asked), work.plus(counter.read())
        if not isinstance(ops[0], ToHost):
            noted.append((work, tuple(sketched(op, group) for op in ops)))
            work = Work()
        replies = tuple(None if isinstance(op, Cut) else reply(op) for op in ops)
        answered = replies if isinstance(asked, tuple) else replies[0]


def _counter(first: bool) -> Counter | Idle:
    return Idle() if first else Counter()


def _several(asked: Any) -> tuple[Op, ...]:
    return asked if isinstance(asked, tuple) else (asked,)
