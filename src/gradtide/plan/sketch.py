"""Requests without their tensors: noted, continued to other sizes, and built anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradtide.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Cut,
    Group,
    Op,
    ReduceScatter,
    Swap,
    part_sizes,
)

Counts = tuple[int, ...]


class Request(NamedTuple):
    """A request of rank 0: elements, per rank where that says more."""

    kind: str
    dtype: torch.dtype
    numel: int
    send: Counts = ()  # to every rank; of parts, their lengths
    recv: Counts = ()
    peer: int = 0  # or a broadcast's source

    @property
    def sent(self) -> int:
        """Elements of this rank's own."""
        return sum(self.send) if self.kind == "AllToAll" else self.numel

    @property
    def received(self) -> int:
        """Elements of the answer."""
        if self.recv:
            return sum(self.recv)
        return sum(self.send) if self.kind == "AllGather" else self.numel


def sketched(op: Op, group: Group) -> Request:
    """A request's kind and sizes, as if the rank that makes it were rank 0."""
    kind, rank = type(op).__name__, group.rank
    match op:
        case Cut(part=x):
            return Request(kind, x.dtype, x.numel())
        case ReduceScatter(tensor=x) | AllGather(tensor=x):
            send = tuple(part_sizes(op, group))
            return Request(kind, x.dtype, x.numel(), send)
        case AllToAll(tensor=x, send=send, recv=recv):
            row = x.numel() // max(len(x), 1)
            leaving, arriving = _turned(send, row, rank), _turned(recv, row, rank)
            return Request(kind, x.dtype, x.numel(), leaving, arriving)
        case Swap(tensor=x, peer=peer):
            return Request(kind, x.dtype, x.numel(), peer=peer ^ rank)
        case Broadcast(tensor=x, source=source):
            return Request(kind, x.dtype, x.numel(), peer=source)
    return Request(kind, op.tensor.dtype, op.tensor.numel())


def _turned(rows: Sequence[int], width: int, rank: int) -> Counts:
    return tuple(n * width for n in (*rows[rank:], *rows[:rank]))


def built(request: Request, group: Group) -> Op:
    """The request with tensors that have no memory."""
    numel = sum(request.send) if request.send else request.numel
    if request.kind == "AllGather":
        numel = request.send[group.rank]
    x = torch.empty(numel, dtype=request.dtype, device="meta")
    match request.kind:
        case "ReduceScatter":
            return ReduceScatter(x, request.send)
        case "AllGather":
            return AllGather(x, request.send)
        case "AllToAll":
            return AllToAll(x, request.send, request.recv)
        case "Swap":
            return Swap(x, request.peer)
        case "Broadcast":
            return Broadcast(x, request.peer)
        case "Cut":
            return Cut(x)
    return AllReduce(x)


def between(
    one: Sequence[tuple[Request, ...]],
    two: Sequence[tuple[Request, ...]],
    weight: float,
    ratio: float,
) -> list[tuple[Request, ...]]:
    """Requests at a third size, from those at two.

    Totals continue in a straight line, `weight` times the difference beyond the second;
    shares of ranks are those at the second. Where different things were asked for,
    what is not a count grows by `ratio`.
    """
    same = [[r.kind for r in a] for a in one] == [[r.kind for r in a] for a in two]
    if not same:
        return [tuple(_grown(r, ratio) for r in asked) for asked in two]
    return [
        tuple(_continued(r, s, weight) for r, s in zip(a, b, strict=True))
        for a, b in zip(one, two, strict=True)
    ]


def _continued(one: Request, two: Request, weight: float) -> Request:
    return two._replace(
        numel=_beyond(one.numel, two.numel, weight),
        send=_shared(one.send, two.send, weight),
        recv=_shared(one.recv, two.recv, weight),
    )


def _beyond(one: int, two: int, weight: float) -> int:
    return max(round(two + (two - one) * weight), 0)


def _shared(one: Counts, two: Counts, weight: float) -> Counts:
    total, new = sum(two), _beyond(sum(one), sum(two), weight)
    if new == total:
        return two
    return tuple(round(n * new / max(total, 1)) for n in two)


def _grown(request: Request, ratio: float) -> Request:
    if request.dtype in (torch.int64, torch.float64):
        return request
    return request._replace(
        numel=round(request.numel * ratio),
        send=tuple(round(n * ratio) for n in request.send),
        recv=tuple(round(n * ratio) for n in request.recv),
    )
