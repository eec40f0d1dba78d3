"""Flows without a network: what they ask for and do, noted while they run.

Flows whose requests depend on shapes alone run on tensors without memory, others on
random gradients.

[Note: Peers] Up to LOCKSTEP ranks all flows run, as in `gradtide.testing`; beyond, one
does, and the others' answers are reflections (`symbolic_requests`). Some flows cannot
read these: then all run, up to CROWD ranks, and what more ask for is what these do,
with as much for each rank. Only trees, which get deeper, run on all ranks however many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from operator import add
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradtide.core.ops import (
    Flow,
    Group,
    Mean,
    Op,
    Steps,
    ToHost,
    driven,
    payload_bytes,
)
from gradtide.core.payload import Payload, traits
from gradtide.planner.clock.symbolic_requests import (
    reflected,
    shaped,
    sketched,
    widened,
)
from gradtide.planner.rehearsal.op_counts import Counter, Work
from gradtide.testing import answer, resume

LOCKSTEP = 8  # ranks up to which all flows run; of more, one with made-up answers
CROWD = 64  # ranks up to which all flows run where one cannot
ROOM = 1 << 29  # elements of all ranks' flows together: some GB
STEPS = 3  # that are rehearsed: the first is unlike the others, which may alternate
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class Act(NamedTuple):
    """A stretch of a flow: work, and then what is asked for, sketched."""

    work: Work
    asked: tuple[Op, ...]


class Script(NamedTuple):
    """One exchange of a bucket.

    Of the first that is noted the work is not counted: it is unlike that of all others,
    and to count takes as long as to run.
    """

    acts: tuple[Act, ...]
    work: Work  # after the last answer
    selector: str = ""
    sparse: bool = False  # entries travelled, and not everything


@dataclass(frozen=True)
class Sharp:
    """Exactly the k largest, for want of noise: stands for any selector."""

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        if k >= x.numel():
            return torch.arange(x.numel(), dtype=torch.int32, device="cpu")
        # Partitioned in a fifth of torch.topk's time, and not counted as work.
        sizes = np.abs(x.float().numpy())
        found = np.argpartition(sizes, x.numel() - max(k, 1))[-max(k, 1) :]
        found.sort()
        return torch.from_numpy(found.astype(np.int32))


@lru_cache(maxsize=512)
def by_shapes(
    collective: Any, numel: int, dtype: torch.dtype, shapes: Shapes, size: int
) -> tuple[Script, ...]:
    """A flow on tensors without memory."""
    group = Group(0, size)
    flat = torch.empty(numel, dtype=dtype, device="meta")
    parts, begin = [], 0
    for shape in shapes:
        n = torch.Size(shape).numel()
        parts.append(flat[begin : begin + n].view(shape))
        begin += -(-n // size) * size
    payload, found = Payload(flat, parts or [flat]), []
    with torch.no_grad(), _Believe():
        for step in range(STEPS):
            payload.flat, payload.nonfinite = flat, 0.0
            flows = [collective.reduce(payload, group)]
            found.append(
                _noted(flows, size, step, lambda ops: [shaped(ops[0], group)])[0]
            )
    return tuple(found)


class _Believe(TorchFunctionMode):
    """Numbers that are not there are all that is hoped for: finite."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0].device.type == "meta":
            return True
        return func(*args, **(kwargs or {}))


def by_numbers(
    collective: Any, numels: Sequence[int], dtype: torch.dtype, size: int
) -> list[tuple[Script, ...]]:
    """Flows on random gradients of each length: all ranks', or one rank's.

    Raises ValueError where it takes all ranks, and they would not fit into memory.
    """
    names = {f.name for f in fields(collective)}
    sharp = replace(collective, select=Sharp()) if "select" in names else collective
    if size > LOCKSTEP:
        # Not where a rank can send nothing of what is made up.
        with suppress(RuntimeError, IndexError):
            return [_by_numbers(sharp, n, dtype, size, everybody=False) for n in numels]
        if size > CROWD:
            with suppress(ValueError):
                return [_widened(sharp, n, dtype, size) for n in numels]
        if size * max(numels) > ROOM:
            raise ValueError(
                f"{sharp!r} cannot be rehearsed among {size} ranks: it takes all of "
                "them, which do not fit into memory; simulate it among fewer"
            )
    return [_by_numbers(sharp, n, dtype, size, everybody=True) for n in numels]


def _widened(
    collective: Any, numel: int, dtype: torch.dtype, size: int
) -> tuple[Script, ...]:
    """In a straight line from what half of CROWD ranks ask for, and CROWD ranks.

    All have as many elements each. Raises ValueError where there is no such line.
    """
    own, half = numel // size, CROWD // 2
    few, more = (
        _by_numbers(collective, own * count, dtype, count, everybody=True)
        for count in (half, CROWD)
    )
    weight = (size - CROWD) / (CROWD - half)
    return tuple(
        _beyond(one, two, weight, size) for one, two in zip(few, more, strict=True)
    )


def _beyond(one: Script, two: Script, weight: float, size: int) -> Script:
    acts = [
        Act(
            b.work.beyond(a.work, weight),
            tuple(
                widened(*pair, weight, size)
                for pair in zip(a.asked, b.asked, strict=True)
            ),
        )
        for a, b in zip(one.acts, two.acts, strict=True)
    ]
    return two._replace(acts=tuple(acts), work=two.work.beyond(one.work, weight))


@lru_cache(maxsize=512)
def _by_numbers(
    collective: Any, numel: int, dtype: torch.dtype, size: int, everybody: bool
) -> tuple[Script, ...]:
    groups = [Group(rank, size) for rank in range(size if everybody else 1)]
    draws = [torch.Generator().manual_seed(1 + group.rank) for group in groups]
    flats = [torch.zeros(numel, dtype=dtype, device="cpu") for _ in groups]
    loads = [Payload(flat, [flat]) for flat in flats]
    alike = traits(collective).alike

    def reflect(ops: Sequence[Op]) -> list[Any]:
        return [reflected(ops[0], groups[0], alike)]

    found, sparse = [], False
    with torch.no_grad():
        for step in range(2):
            for draw, flat in zip(draws, flats, strict=True):
                fresh = torch.randn(
                    numel, generator=draw, dtype=torch.float32, device="cpu"
                )
                flat += fresh.pow_(3).to(dtype)
            rows = zip(loads, groups, strict=True)
            flows = [collective.reduce(*row) for row in rows]
            answers = answer if everybody else reflect
            script, means = _noted(flows, size, step, answers)
            sent = [payload.num_sent for payload in loads]
            # Who delivers nothing has selected all the same, if it did before.
            sparse = any(0 < n < numel for n in sent) or (sparse and not any(sent))
            found.append(script._replace(sparse=sparse))
            for payload in loads:
                payload.num_sent = 0
            for flat, mean in zip(flats, means, strict=True):
                if flat.data_ptr() == mean.data_ptr():
                    flat.zero_()
    return tuple(found)


def _noted(
    flows: Sequence[Flow],
    size: int,
    step: int,
    answers: Callable[[Sequence[Op]], Sequence[Any]],
) -> tuple[Script, list[Tensor]]:
    """What flows ask for, of each request that of the rank that sends most, and means.

    `answers` are those to what all flows ask for at once.
    """
    flows = [driven(flow, partial(_dividing, size=size)) for flow in flows]
    counter = Counter()
    counting: AbstractContextManager[Any] = counter if step else nullcontext()
    acts: list[Act] = []
    told: list[Any] = [None] * len(flows)
    work = Work()
    while True:
        with counting:
            asked, means = resume(flows, told)
        work = Work(*map(add, work, counter.read(len(flows))))
        if means:
            return Script(tuple(acts), work), means
        together = isinstance(asked[0], tuple)
        columns = list(zip(*asked, strict=True)) if together else [asked]
        if not isinstance(columns[0][0], ToHost):
            acts.append(Act(work, tuple(_busiest(ops, size) for ops in columns)))
            work = Work()
        rows = zip(*map(answers, columns), strict=True)
        told = [row if together else row[0] for row in rows]


def _dividing(asked: Any, size: int) -> Steps:
    """What is asked; that a mean's part is divided is counted as work."""
    answer = yield asked
    if isinstance(asked, Mean):
        answer[: len(answer) // size].div_(1)
    return answer


def _busiest(ops: Sequence[Op], size: int) -> Op:
    groups = [Group(rank, size) for rank in range(len(ops))]
    sent = list(map(payload_bytes, ops, groups))
    rank = sent.index(max(sent))
    return sketched(ops[rank], groups[rank])
