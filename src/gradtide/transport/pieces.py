"""A device's request as requests of host memory, in one piece or several.

[Note: Columns] Parts of equal length are the rows of a matrix, of which some columns
travel at a time: while these are on the wire, the next are copied down, and those
before are copied up. Every element is added up in the same order as without that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from torch import Tensor

from gradtide.core import ops
from gradtide.core.ops import Group, Message

COLUMNS = 1 << 20  # bytes of each part that travel at a time; more => less overlaps
Halves: TypeAlias = ops.Mean | ops.ReduceScatter | ops.AllGather  # what has parts


class Piece(NamedTuple):
    """What to ask of host memory, and what is copied down before, and up after.

    `room` is host memory for an answer that `op` has no place for.
    """

    op: Message
    down: Tensor
    into: Tensor
    up: Tensor
    room: Tensor | None = None


def answer_to(asked: Message, group: Group) -> Tensor:
    """Memory on the device for the answer: what is asked says where, or it is new."""
    match asked:
        case ops.ReduceScatter(tensor=x):
            return x.split_with_sizes(ops.part_sizes(asked, group))[group.rank]
        case ops.AllGather(tensor=x, sizes=None, into=None):
            return x.new_empty((group.size, *x.shape))
        case ops.AllGather(tensor=x, into=into):
            sizes = ops.part_sizes(asked, group)
            return x.new_empty(sum(sizes)) if into is None else into
        case ops.AllToAll(tensor=x, recv=recv):
            return x.new_empty((sum(recv), *x.shape[1:]))
        case ops.Swap(tensor=x):
            return x.new_empty(x.shape)
    return asked.tensor


def length(asked: Message, answer: Tensor) -> int:
    """How many elements of host memory all pieces take together."""
    match asked:
        case ops.AllGather():
            return answer.numel()
        case ops.AllToAll() | ops.Swap():
            return asked.tensor.numel() + answer.numel()
    return asked.tensor.numel()


def pieces(
    asked: Message, group: Group, answer: Tensor, memory: Tensor
) -> Iterator[Piece]:
    """All of a request; `memory` (1-D) has its dtype and the `length` that it takes."""
    if isinstance(asked, Halves):
        sizes = ops.part_sizes(asked, group)
        if len(set(sizes)) == 1:
            yield from _columns(asked, group, answer, memory)
        elif isinstance(asked, ops.AllGather):
            own = memory.split_with_sizes(sizes)[group.rank]
            there = ops.AllGather(own, sizes, into=memory)
            yield Piece(there, asked.tensor.flatten(), own, answer.view(-1))
        else:
            yield Piece(replace(asked, tensor=memory), asked.tensor, memory, answer)
        return
    x = asked.tensor
    into, room = memory[: x.numel()].view(x.shape), None
    if isinstance(asked, ops.AllToAll | ops.Swap):
        room = memory[x.numel() :].view(answer.shape)
    piece = Piece(replace(asked, tensor=into), x, into, answer, room)
    if isinstance(asked, ops.Broadcast) and asked.source != group.rank:
        piece = piece._replace(down=x.flatten()[:0], into=memory[:0])
    yield piece


def _columns(
    asked: Halves, group: Group, answer: Tensor, memory: Tensor
) -> Iterator[Piece]:
    """See [Note: Columns]."""
    span = memory.numel() // group.size
    count = math.ceil(span * memory.element_size() / COLUMNS)
    width = math.ceil(span / max(count, 1))
    for begin in range(0, span, max(width, 1)):
        some = slice(begin, min(begin + width, span))
        flat = memory[some.start * group.size : some.stop * group.size]
        there = flat.view(group.size, -1)
        if isinstance(asked, ops.AllGather):
            own, whole = there[group.rank], answer.view(group.size, -1)
            down = asked.tensor.flatten()[some]
            yield Piece(ops.AllGather(own, into=flat), down, own, whole[:, some])
            continue
        down = asked.tensor.view(group.size, -1)[:, some]
        if isinstance(asked, ops.Mean):
            yield Piece(ops.Mean(flat), down, there, down)
        else:
            summed = ops.ReduceScatter(flat, mean=asked.mean)
            yield Piece(summed, down, there, answer[some])
