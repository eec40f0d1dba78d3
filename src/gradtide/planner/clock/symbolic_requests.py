"""Requests and answers without a network: sketched, continued to other sizes, made up.

[Note: Reflection] Ranks are alike: what they select is drawn from one distribution. So
what this rank sends to rank j stands for what rank j would send to it: as many
different random selections as there are ranks, of the right lengths. What is told to
everybody alike comes back from everybody. Messages that are gathered are copies of this
rank's; or all zeros, which a message of entries of any number may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtide.core import ops
from gradtide.core.ops import Group, Op

Counts: TypeAlias = tuple[int, ...]  # for every rank

# - Requests ---------------------------------------------------------------------------


def sketched(op: Op, group: Group) -> Op:
    """A request on tensors without memory, as if the rank that makes it were rank 0."""
    x, *_ = _taken_apart(op)
    rest: tuple[Any, ...] = ()
    match op:
        case ops.ReduceScatter() | ops.AllGather():
            rest = (tuple(ops.part_sizes(op, group)),)
        case ops.AllToAll(recv=recv, used=used):
            # What others use of a row is not known: as much as this rank.
            row = max(used) if used else x.numel() // max(len(x), 1)
            sent = ops.sent_to(op)
            rest = _turned(sent, 1, group.rank), _turned(recv, row, group.rank)
        case ops.Swap(peer=peer):
            rest = (peer ^ group.rank,)
        case ops.Broadcast(source=source):
            rest = (source,)
    return _built(type(op), x.dtype, x.numel(), rest)


def _taken_apart(op: Op) -> list[Any]:
    """The tensor of a request, and what else it says."""
    return [getattr(op, field.name) for field in fields(op)]


def _turned(rows: Sequence[int], width: int, rank: int) -> Counts:
    return tuple(n * width for n in (*rows[rank:], *rows[:rank]))


def _built(kind: type[Any], dtype: torch.dtype, numel: int, rest: Sequence[Any]) -> Op:
    """A request of rank 0; where it has counts, they say how many elements."""
    if rest and isinstance(rest[0], tuple):
        numel = rest[0][0] if kind is ops.AllGather else sum(rest[0])
    made: Op = kind(torch.empty(numel, dtype=dtype, device="meta"), *rest)
    return made


def between(
    one: Sequence[Sequence[Op]],
    two: Sequence[Sequence[Op]],
    weight: float,
    ratio: float,
) -> list[tuple[Op, ...]]:
    """Sketched requests at a third size, from those at two.

    Totals continue in a straight line, `weight` times the difference beyond the second;
    shares of ranks are those at the second. Where different things were asked for,
    what is not a count grows by `ratio`.
    """
    kinds, others = (
        [[type(op) for op in row] for row in asked] for asked in (one, two)
    )
    if kinds != others:
        return [tuple(_grown(op, ratio) for op in row) for row in two]
    return [
        tuple(_continued(op, other, weight) for op, other in zip(a, b, strict=True))
        for a, b in zip(one, two, strict=True)
    ]


def _continued(one: Op, two: Op, weight: float) -> Op:
    (x, *before), (y, *rest) = _taken_apart(one), _taken_apart(two)
    shared = [
        _shared(a, b, weight) if isinstance(b, tuple) else b
        for a, b in zip(before, rest, strict=True)
    ]
    return _built(type(two), y.dtype, _beyond(x.numel(), y.numel(), weight), shared)


def _beyond(one: int, two: int, weight: float) -> int:
    return max(round(two + (two - one) * weight), 0)


def _shared(one: Counts, two: Counts, weight: float) -> Counts:
    total, new = sum(two), _beyond(sum(one), sum(two), weight)
    if new == total:
        return two
    return tuple(round(n * new / max(total, 1)) for n in two)


def _grown(op: Op, ratio: float) -> Op:
    x, *rest = _taken_apart(op)
    if x.dtype in (torch.int64, torch.float64):
        return op
    grown = [
        tuple(round(n * ratio) for n in part) if isinstance(part, tuple) else part
        for part in rest
    ]
    return _built(type(op), x.dtype, round(x.numel() * ratio), grown)


def widened(few: Op, more: Op, weight: float, size: int) -> Op:
    """A sketched request among `size` ranks, from those of few and of more.

    Each rank has as much in all of them. Sizes continue in a straight line, `weight`
    times the difference beyond the second; shares of ranks are those of the second.
    Raises ValueError for one whose number depends on how many ranks there are.
    """
    if isinstance(more, ops.Swap | ops.Broadcast):
        raise ValueError(f"{type(more).__name__}: a tree of more ranks is deeper")
    x, *rest = _taken_apart(more)
    grown = [
        tuple(part[i * len(part) // size] for i in range(size))
        if isinstance(part, tuple)
        else part
        for part in rest
    ]
    before, *_ = _taken_apart(few)
    return _built(
        type(more), x.dtype, _beyond(before.numel(), x.numel(), weight), grown
    )


# - Answers ----------------------------------------------------------------------------


def shaped(op: Op, group: Group) -> Any:
    """An answer of the right shape, dtype and device; values are anybody's guess."""
    match op:
        case ops.ReduceScatter(tensor=x):
            sizes = ops.part_sizes(op, group)
            return x.narrow(0, sum(sizes[: group.rank]), sizes[group.rank])
        case ops.AllGather(tensor=x, into=into):
            if into is not None:
                return into
            whole = x.new_empty(sum(ops.part_sizes(op, group)))
            return whole if op.sizes is not None else whole.view(group.size, *x.shape)
        case ops.AllToAll(tensor=x, recv=recv):
            return x.new_empty((sum(recv), *x.shape[1:]))
        case ops.Swap(tensor=x):
            return torch.empty_like(x)
        case ops.AllReduce() | ops.Mean() | ops.Broadcast() | ops.ToHost():
            return op.tensor
    return None


def reflected(op: Op, group: Group, alike: bool) -> Any:
    """An answer as if the others had sent what this rank sends, see [Note: Reflection].

    With `alike`, gathered messages are copies of this rank's.
    """
    rank, size = group
    match op:
        case ops.AllGather(tensor=x, into=None, sizes=None):
            return x.expand(size, *x.shape).clone()
        case ops.AllGather(tensor=x, into=None):
            own = x.flatten()
            pieces = [
                own if r == rank else _resized(own if alike else own[:0], n)
                for r, n in enumerate(ops.part_sizes(op, group))
            ]
            return torch.cat(pieces)
        case ops.AllGather(tensor=x, into=Tensor() as into):
            for part in torch.split(into, ops.part_sizes(op, group)):
                part.copy_(x.flatten()[: len(part)])
        case ops.AllToAll(tensor=x, send=send, recv=recv) if list(send) != list(recv):
            rows = zip(torch.split(x, list(send)), recv, strict=True)
            return torch.cat([_resized(row, n) for row, n in rows])
        case ops.AllToAll(tensor=x) | ops.Swap(tensor=x):
            return x.clone()
        case ops.Broadcast(tensor=x, source=source):
            if source != rank and not x.dtype.is_floating_point:
                x.copy_(
                    torch.arange(x.numel(), dtype=torch.int64, device="cpu").view(
                        x.shape
                    )
                )
    return shaped(op, group)


def _resized(rows: Tensor, n: int) -> Tensor:
    """The first n rows, and zeros where there are fewer."""
    kept = rows[:n]
    return torch.cat([kept, kept.new_zeros((n - len(kept), *kept.shape[1:]))])
