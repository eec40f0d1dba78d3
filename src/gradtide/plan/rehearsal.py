"""What a collective asks for: found out by running it, on fewer numbers.

The real flow runs for some steps on random gradients, and its requests are noted. What
was noted is the script of a bucket: the virtual engine plays it, at the size of the
real bucket, whenever the bucket is launched.

[Note: Sizes] A flow whose requests depend on shapes alone runs on tensors without
memory, at full size. Others select from numbers. They run at some sizes, each twice the
one before, and the totals of every request lie on a straight line through the two
nearest: counts stay, entries grow. The largest size leaves every rank some entries for
every other, so that no rounding to whole entries or to messages' alignment matters.

[Note: Peers] Up to LOCKSTEP ranks all flows run, as in `gradtide.testing`; beyond, one
does, and the others' answers are reflections (`answers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradtide.bucket import Collective, Payload
from gradtide.collectives import (
    ACPSGD,
    Agreed,
    Corrected,
    Dense,
    Leader,
    OkTopk,
    PowerSGD,
    Warmup,
)
from gradtide.collectives.leader import SMALL as LEADER_SMALL
from gradtide.ops import Cut, Flow, Group, Op, ToHost, payload_bytes
from gradtide.plan.answers import reflected, shaped
from gradtide.plan.sketch import Request, between, built, sketched
from gradtide.testing import answer

LOCKSTEP = 8  # ranks up to which all flows run
ENTRIES = 128  # that a rank has for every other, where a script is continued
FEWEST = 8
FIRST = 64  # elements for every rank up to which a bucket is rehearsed as it is
LONGEST = 1 << 15  # of a rank's part: indices in it take 16 bits, also if it is uneven
MOST = 1 << 21  # elements of all flows together, as far as FEWEST allows
STEPS = 3  # that are rehearsed: the first is unlike the others, which may alternate
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class Work(NamedTuple):
    """What the processor does before a request: counts of elements."""

    scanned: float = 0.0  # by the selector
    moved: float = 0.0  # copied, cast or added
    entries: float = 0.0  # unpacked and added


class Act(NamedTuple):
    """A stretch of a flow: work, and then what is asked for (empty: the cut)."""

    work: Work
    asked: tuple[Op, ...]
    several: bool  # were asked for together


class Script(NamedTuple):
    """One exchange of a bucket."""

    acts: tuple[Act, ...]
    work: Work  # after the last answer
    selector: str


@dataclass(frozen=True)
class Sharp:
    """Exactly the k largest, for want of noise: stands for any selector."""

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        if k >= x.numel():
            return torch.arange(x.numel(), dtype=torch.int32)
        sizes = x.abs().float().numpy()  # partitioned in a fifth of torch.topk's time
        found = np.argpartition(sizes, x.numel() - max(k, 1))[-max(k, 1) :]
        found.sort()
        return torch.from_numpy(found.astype(np.int32))


def scripts(
    collective: Collective, numel: int, dtype: torch.dtype, shapes: Shapes, size: int
) -> Sequence[Script]:
    """The exchanges of a bucket of `numel` elements in the first two or three steps.

    `shapes` are those of its parts, for collectives that work on matrices. Raises
    ValueError where a collective cannot be run without its peers.
    """
    inner = settled(collective)
    if not isinstance(inner, ACPSGD | PowerSGD):
        shapes = ()
    return _scripts(inner, numel, dtype, shapes, size)


def script_of(played: Sequence[Script], step: int) -> Script:
    """That of any step: after the first, the others in turn."""
    return played[0 if step == 0 else 1 + (step - 1) % (len(played) - 1)]


def settled(collective: Any) -> Any:
    """The collective after its warm-up, without what is done to gradients before."""
    while isinstance(collective, Warmup | Corrected):
        collective = collective.collective
    return collective


@lru_cache(maxsize=4096)
def _scripts(
    collective: Any, numel: int, dtype: torch.dtype, shapes: Shapes, size: int
) -> Sequence[Script]:
    selector = type(getattr(collective, "select", None)).__name__
    if isinstance(collective, Agreed):
        selector = "Threshold"
    group = Group(0, size)
    if isinstance(collective, ACPSGD | PowerSGD):
        noted = _by_shapes(collective, numel, dtype, shapes, size)
        return tuple(_script(n, numel, dtype, "", group) for n in noted)
    if isinstance(collective, Dense):
        one, two = (
            _by_shapes(collective, n, dtype, (), size) for n in (size, 2 * size)
        )
        straight = between(one[0], two[0], numel / size - 2, numel / (2 * size))
        return (_script(straight, numel, dtype, "", group),) * 2
    low, high = _rungs(collective, numel, size)
    noted = _by_numbers(collective, high, dtype, size)
    if low < high:
        before = _by_numbers(collective, low, dtype, size)
        weight = (numel - high) / (high - low)
        noted = [
            between(a, b, weight, numel / high)
            for a, b in zip(before, noted, strict=True)
        ]
    scanned = numel / size if isinstance(collective, Agreed) else numel
    return tuple(_script(n, scanned, dtype, selector, group) for n in noted)


def _rungs(collective: Any, numel: int, size: int) -> tuple[int, int]:
    """The two sizes from which the script for `numel` is made; or `numel` itself."""
    first = FIRST * size
    if numel <= first:
        return numel, numel
    density = float(getattr(collective, "density", 0.01))
    room = MOST // min(size, LOCKSTEP)
    entries = max(FEWEST, min(ENTRIES, int(room * density / size)))
    rung, most = first, min(entries / density, LONGEST) * size
    if isinstance(collective, Leader):  # sends a few values in another way than many
        most = max(most, 3 * LEADER_SMALL / (density * 4))
    while rung < min(numel, most):
        rung *= 2
    return rung // 2, rung


def _script(
    noted: Sequence[tuple[Request, ...]],
    scanned: float,
    dtype: torch.dtype,
    selector: str,
    group: Group,
) -> Script:
    """Requests of the real size, with the work around them."""
    acts: list[Act] = []
    sparse = any(r.kind != "Cut" and r.dtype == torch.uint8 for a in noted for r in a)
    work = Work(scanned=scanned if sparse and selector else 0.0)
    for asked in noted:
        if asked[0].kind == "Cut":
            acts.append(Act(work, (), False))
            work = Work()
            continue
        casts = sum(r.sent for r in asked if _narrow(r.dtype, dtype))
        work = work._replace(moved=work.moved + casts)
        ops = tuple(built(r, group) for r in asked)
        acts.append(Act(work, ops, len(asked) > 1))
        entry = dtype.itemsize + 2
        work = Work(
            moved=sum(r.received for r in asked if _narrow(r.dtype, dtype)),
            entries=sum(r.received for r in asked if r.dtype == torch.uint8) / entry,
        )
    return Script(tuple(acts), work, selector)


def _narrow(wire: torch.dtype, own: torch.dtype) -> bool:
    return wire.is_floating_point and wire.itemsize < own.itemsize


# - Flows -----------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _by_shapes(
    collective: Any, numel: int, dtype: torch.dtype, shapes: Shapes, size: int
) -> list[list[tuple[Request, ...]]]:
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
        for _ in range(1 if isinstance(collective, Dense) else STEPS):
            load.flat, load.alarm = flat, 0.0
            flow, noted = collective.reduce(load, group), []
            for asked in _asked(flow, lambda op: shaped(op, group)):
                noted.append(tuple(sketched(op, group) for op in asked))
            steps.append(noted)
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
def _by_numbers(
    collective: Any, numel: int, dtype: torch.dtype, size: int
) -> list[list[tuple[Request, ...]]]:
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
        for _ in range(2):
            for draw, flat in zip(draws, flats, strict=True):
                fresh = torch.randn(numel, generator=draw, dtype=torch.float32)
                flat += fresh.pow_(3).to(dtype)
            flows = [
                sharp.reduce(load, Group(rank, size))
                for rank, load in zip(ranks, loads, strict=True)
            ]
            if everybody:
                noted, means = _together(flows)
            else:
                noted, means = _alone(flows[0], sharp, size)
            steps.append(noted)
            for flat, mean in zip(flats, means, strict=True):
                if flat.data_ptr() == mean.data_ptr():
                    flat.zero_()
    return steps


def _together(
    flows: Sequence[Flow],
) -> tuple[list[tuple[Request, ...]], list[Tensor]]:
    """All ranks in lockstep; of each request that of the rank that sends most."""
    noted: list[tuple[Request, ...]] = []
    size = len(flows)
    answers: list[Any] = [None] * size
    while True:
        asked: list[Any] = []
        means: list[Tensor] = []
        for flow, one in zip(flows, answers, strict=True):
            try:
                asked.append(flow.send(one))
            except StopIteration as stop:
                means.append(stop.value)
        if means:
            return noted, means
        columns = list(zip(*map(_several, asked), strict=True))
        if not isinstance(columns[0][0], ToHost):
            noted.append(tuple(map(_busiest, columns)))
        rows = list(zip(*(answer(ops) for ops in columns), strict=True))
        together = isinstance(asked[0], tuple)
        answers = [row if together else row[0] for row in rows]


def _busiest(ops: Sequence[Op]) -> Request:
    size = len(ops)
    sent = [payload_bytes(op, Group(rank, size)) for rank, op in enumerate(ops)]
    rank = sent.index(max(sent))
    return sketched(ops[rank], Group(rank, size))


def _alone(
    flow: Flow, collective: Any, size: int
) -> tuple[list[tuple[Request, ...]], list[Tensor]]:
    group, noted = Group(0, size), list[tuple[Request, ...]]()
    alike = not isinstance(collective, OkTopk)
    means: list[Tensor] = []
    try:
        asking = _asked(flow, lambda op: reflected(op, group, alike), means)
        noted = [tuple(sketched(op, group) for op in asked) for asked in asking]
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"{collective!r} cannot be rehearsed among {size} ranks, with answers made "
            f"up for all but one ({error}): simulate it among up to {LOCKSTEP}"
        ) from error
    return noted, means


def _asked(flow: Flow, reply: Any, means: list[Tensor] | None = None) -> Iterator[Any]:
    """What a flow asks for, as tuples, but for what is not sent; it gets replies."""
    answered: Any = None
    while True:
        try:
            asked = flow.send(answered)
        except StopIteration as stop:
            if means is not None:
                means.append(stop.value)
            return
        ops = _several(asked)
        if not isinstance(ops[0], ToHost):
            yield ops
        replies = tuple(None if isinstance(op, Cut) else reply(op) for op in ops)
        answered = replies if isinstance(asked, tuple) else replies[0]


def _several(asked: Any) -> tuple[Op, ...]:
    return asked if isinstance(asked, tuple) else (asked,)
