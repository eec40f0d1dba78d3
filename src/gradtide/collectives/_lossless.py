"""The two halves of a dense exchange whose messages have as many bytes as they need.

Its bits are those of the exchange that sends all bytes: sums are taken in the order of
a ring where nothing is rounded, and in that of ranks where values are cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtide.core.ops import AllToAll, Cut, Flow, Group, Steps, ToHost
from gradtide.core.payload import Payload
from gradtide.wire import Codec
from gradtide.wire.lossless import HEAD, Lossless, Message
from gradtide.wire.lossless import INTEGERS as INTEGERS
from gradtide.wire.lossless import prepare as prepare


def mean(payload: Payload, codec: Codec, group: Group) -> Flow:
    """The mean of all ranks' buckets, in their own memory."""
    rank, size = group
    rows = payload.flat.view(size, -1)
    part, others = rows[rank], [r for r in range(size) if r != rank]
    own = Lossless(codec.dtype, len(part))
    # A row for every other rank, and one for the mean.
    messages = payload.message_buffer(size, own.room)
    for message, other in zip(messages, others, strict=False):
        own.write(rows[other].to(codec.dtype), message)
    arrived = yield from _exchange(messages[:-1], own, group)
    heard = dict(zip(others, arrived, strict=True))
    values = part.new_empty(len(part), dtype=codec.dtype)
    if codec.exact:
        first, *following = ((rank + i) % size for i in range(1, size))
        total = torch.empty_like(part)
        own.read(heard[first], total)
        for other in following:
            own.read(heard[other], values)
            total.add_(values)
        part.add_(total)
    else:
        sent = part.to(codec.dtype)
        for other in range(size):
            if other != rank:
                own.read(heard[other], values)
            here = sent if other == rank else values
            part.copy_(here) if other == 0 else part.add_(here)
    part.div_(size)
    yield Cut(part)
    sent = part.to(codec.dtype)
    own.write(sent, messages[-1])
    arrived = yield from _exchange(messages[-1:].expand(size - 1, -1), own, group)
    for other, message in zip(others, arrived, strict=True):
        own.read(message, rows[other] if codec.exact else values)
        if not codec.exact:
            rows[other].copy_(values)
    if not codec.exact:
        part.copy_(sent)
    return payload.flat


def _exchange(messages: Tensor, own: Lossless, group: Group) -> Steps:
    """Send every other rank its row; the answer is what each has sent.

    The host waits for numbers twice: for what is to be sent, and for what has come.
    """
    rank, size = group
    there = [int(r != rank) for r in range(size)]
    heads = yield ToHost(messages[:, :HEAD])
    used = [own.length(head) for head in heads]
    arrived = yield AllToAll(messages, there, there, used)
    heads = yield ToHost(arrived[:, :HEAD])
    return [Message(*both) for both in zip(arrived, heads, strict=True)]
