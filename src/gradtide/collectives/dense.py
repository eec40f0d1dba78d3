"""Everything travels: the two halves of a ring all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.bucket import Payload, Traits
from gradtide.collectives._entries import Wire, check_wire, wire_dtype
from gradtide.ops import AllGather, AllToAll, Cut, Flow, Group, ReduceScatter


@dataclass(frozen=True)
class Dense(Traits):
    """Exact mean: reduce-scatter, then all-gather (Patarasuk and Yuan, 2009).

    Two rounds of P - 1 messages, 2 n (P - 1) / P elements a rank; leaves nothing
    behind. With `wire` ("bf16", "fp16") values are cast when they leave: every
    contribution once, the mean once; they are added in the buffer's own precision. What
    the casts round off is lost, not left behind.
    """

    wire: Wire = None

    dense = True
    depends_on = "length"

    def __post_init__(self) -> None:
        check_wire("Dense", self.wire)

    def reduce(self, load: Payload, group: Group) -> Flow:
        x = load.flat
        if group.size == 1:
            yield Cut(x)
            return x
        dtype = wire_dtype(x.dtype, self.wire)
        if dtype == x.dtype:
            part = yield ReduceScatter(x)
            yield Cut(part.div_(group.size))
            mean: Tensor = yield AllGather(part, into=x)
            return mean
        part = yield from _scatter_cast(x, dtype, group)
        yield Cut(part.div_(group.size))
        return x.copy_((yield AllGather(part.to(dtype))).flatten())


def _scatter_cast(x: Tensor, dtype: torch.dtype, group: Group) -> Flow:
    """Sum of this rank's part, every contribution rounded to `dtype` once.

    Direct messages instead of a ring: a ring would round the partial sums at every hop.
    """
    rows = x.view(group.size, -1).to(dtype)
    ones = [1] * group.size
    received: Tensor = yield AllToAll(rows, ones, ones)
    part = x.view(group.size, -1)[group.rank].copy_(received[0])
    for row in received[1:]:
        part.add_(row)
    return part
