"""Answers to requests when there is only one rank: made up for the others.

[Note: Reflection] Ranks are alike: what they select is drawn from one distribution. So
what this rank sends to rank j stands for what rank j would send to it: as many
different random selections as there are ranks, of the right lengths. What is told to
everybody alike comes back from everybody. Messages that are gathered are copies of this
rank's; or all zeros, which a message of entries of any number may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradtide.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Group,
    Op,
    ReduceScatter,
    Swap,
    ToHost,
    part_sizes,
)


def shaped(op: Op, group: Group) -> Any:
    """An answer of the right shape, dtype and device; values are anybody's guess."""
    match op:
        case ReduceScatter(tensor=x):
            sizes = part_sizes(op, group)
            return x.narrow(0, sum(sizes[: group.rank]), sizes[group.rank])
        case AllGather(tensor=x, into=into):
            if into is not None:
                return into
            sizes = part_sizes(op, group)
            whole = x.new_empty(sum(sizes))
            return whole if op.sizes is not None else whole.view(group.size, *x.shape)
        case AllToAll(tensor=x, recv=recv):
            return x.new_empty((sum(recv), *x.shape[1:]))
        case Swap(tensor=x):
            return torch.empty_like(x)
        case AllReduce(tensor=x) | Broadcast(tensor=x) | ToHost(tensor=x):
            return x
    return None


def reflected(op: Op, group: Group, alike: bool) -> Any:
    """An answer as if the others had sent what this rank sends, see [Note: Reflection].

    With `alike`, gathered messages are copies of this rank's.
    """
    rank, size = group
    match op:
        case AllGather(tensor=x, into=None, sizes=None):
            return x.expand(size, *x.shape).clone()
        case AllGather(tensor=x, into=None, sizes=sizes) if sizes is not None:
            own = x.flatten()
            pieces = [
                own if r == rank else _resized(own if alike else own[:0], n)
                for r, n in enumerate(sizes)
            ]
            return torch.cat(pieces)
        case AllGather(tensor=x, into=into) if into is not None:
            for part in torch.split(into, part_sizes(op, group)):
                part.copy_(x.flatten()[: len(part)])
            return into
        case AllToAll(tensor=x, send=send, recv=recv):
            if list(send) == list(recv):
                return x.clone()
            return _turned(x, send, recv)
        case Swap(tensor=x):
            return x.clone()
        case Broadcast(tensor=x, source=source):
            if source != rank and not x.dtype.is_floating_point:
                x.copy_(torch.arange(x.numel()).view(x.shape))
            return x
    return shaped(op, group)


def _turned(x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
    rows = torch.split(x, list(send))
    return torch.cat([_resized(row, n) for row, n in zip(rows, recv, strict=True)])


def _resized(rows: Tensor, n: int) -> Tensor:
    """The first n rows, and zeros where there are fewer."""
    kept = rows[:n]
    return torch.cat([kept, kept.new_zeros((n - len(kept), *kept.shape[1:]))])
