"""The two halves of a dense exchange whose messages have as many bytes as they need.

Its bits are those of the exchange that sends all bytes: sums are taken in the order of
a ring where nothing is rounded, and in that of ranks where values are cast.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradtide.core.ops import AllToAll, Cut, Flow, Group, Steps, ToHost
from gradtide.core.payload import Payload
from gradtide.wire import Codec
from gradtide.wire.lossless import INTEGERS, Lossless


def knows(codec: Codec) -> bool:
    """Whether values that travel so have a shorter form."""
    return codec.dtype in INTEGERS and not codec.keeps


def mean(payload: Payload, codec: Codec, group: Group) -> Flow:
    """The mean of all ranks' buckets, in their own memory."""
    rows = payload.flat.view(group.size, -1)
    talk = _Talk(payload, Lossless(codec.dtype, rows.shape[1]), group)
    others = [row for rank, row in enumerate(rows) if rank != group.rank]
    for row, message in zip(others, talk.messages, strict=False):
        talk.write(row, message)
    arrived = yield from talk.exchange(talk.messages[:-1])
    part = rows[group.rank]
    if codec.exact:
        part.add_(
            _sum(talk.read(arrived, group.rank + i) for i in range(1, group.size))
        )
    else:
        own = part.to(codec.dtype)
        for rank in range(group.size):
            values = own if rank == group.rank else talk.read(arrived, rank)
            part.copy_(values) if rank == 0 else part.add_(values)
    part.div_(group.size)
    yield Cut(part)
    own, message = part.to(codec.dtype), talk.messages[-1:]
    talk.write(own, message[0])
    arrived = yield from talk.exchange(message.expand(group.size - 1, -1))
    for rank, row in enumerate(rows):
        row.copy_(own if rank == group.rank else talk.read(arrived, rank))
    return payload.flat


def _sum(values: Iterator[Tensor]) -> Tensor:
    """One after the other; each is gone when the next one is there."""
    total = next(values).clone()
    for each in values:
        total.add_(each)
    return total


class _Talk:
    """Messages to every other rank, one for the mean, and what arrives."""

    def __init__(self, payload: Payload, own: Lossless, group: Group) -> None:
        self.messages = payload.message_buffer(group.size, own.room)
        self._own, self._group = own, group
        self._values = payload.flat.new_empty(own.numel, dtype=own.dtype)

    def write(self, values: Tensor, message: Tensor) -> None:
        self._own.write(values.to(self._own.dtype), message)

    def exchange(self, messages: Tensor) -> Steps:
        """Send every other rank its row; the answer has theirs."""
        rank, size = self._group
        there = [int(r != rank) for r in range(size)]
        heads = yield ToHost(messages[:, :8])
        used = [self._own.likely] * len(messages)
        if not heads.is_meta:
            used = heads.contiguous().view(torch.int64).flatten().tolist()
        return (yield AllToAll(messages, there, there, used))

    def read(self, arrived: Tensor, rank: int) -> Tensor:
        """What another rank, counted around, has sent; until the next call."""
        rank %= self._group.size
        self._own.read(arrived[rank - (rank > self._group.rank)], self._values)
        return self._values
