"""Everything travels: the two halves of a ring all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.collectives._entries import Wire, check, wire_dtype
from gradtide.core.ops import AllGather, AllToAll, Cut, Flow, Group, ReduceScatter
from gradtide.core.payload import Payload, Traits


@dataclass(frozen=True)
class Dense(Traits):
    """Average everything exactly, by a reduce-scatter and an all-gather.

    The ring of both halves is by Patarasuk and Yuan (Bandwidth optimal all-reduce
    algorithms for clusters of workstations, JPDC 2009).

    Cost, with P ranks: two rounds of P - 1 messages. Of a bucket of n elements a rank
    sends 2 n (P - 1) / P: for float32 8 n (P - 1) / P bytes, with `wire` half of that.

    Residual: none. With `wire` every contribution is rounded once when it leaves, and
    the mean once; sums are taken in the bucket's own dtype. What the casts take off is
    lost, which is the one exception from the conservation law.

    Args:
        wire: What values are cast to when they travel. "bf16" keeps the range of
            float32 and 8 bits of precision; "fp16" keeps 11 bits, overflows above
            65504, and loses very small values. None, the default, casts nothing,
            because only that is exact. Values of at most 16 bits travel as they are.

    Raises:
        ValueError: `wire` is something else.
    """

    wire: Wire = None

    dense = True
    depends_on = "length"

    def __post_init__(self) -> None:
        check("Dense", self.wire)

    def reduce(self, payload: Payload, group: Group) -> Flow:
        x = payload.flat
        if group.size == 1:
            yield Cut(x)
            return x
        dtype = wire_dtype(x.dtype, self.wire)
        part = yield from first_half(x, dtype, group)
        yield Cut(part)
        return (yield from second_half(x, part, dtype))


def first_half(x: Tensor, dtype: torch.dtype, group: Group) -> Flow:
    """This rank's part of the mean, every contribution rounded to `dtype` once.

    Direct messages then instead of a ring, which would round the partial sums at every
    hop. `x` is 1-D, its length a multiple of the group's size; the part is a view.
    """
    if dtype == x.dtype:
        whole: Tensor = yield ReduceScatter(x)
        return whole.div_(group.size)
    rows = x.view(group.size, -1)
    ones = [1] * group.size
    received = yield AllToAll(rows.to(dtype), ones, ones)
    part = rows[group.rank].copy_(received[0])
    for row in received[1:]:
        part.add_(row)
    return part.div_(group.size)


def second_half(x: Tensor, part: Tensor, dtype: torch.dtype) -> Flow:
    """All parts of the mean, written to `x`."""
    if dtype == x.dtype:
        mean: Tensor = yield AllGather(part, into=x)
        return mean
    return x.copy_((yield AllGather(part.to(dtype))).flatten())


def padded(values: Tensor, size: int) -> Tensor:
    """A copy of `values` (1-D) and zeros that can be cut into `size` equal parts."""
    length = -(-max(len(values), 1) // size) * size
    return torch.nn.functional.pad(values, (0, length - len(values)))


def averaged(values: Tensor, wire: Wire, group: Group) -> Flow:
    """The mean of `values` (1-D) over all ranks, by `Dense`."""
    x = padded(values, group.size)
    mean = yield from Dense(wire).reduce(Payload(x, [x]), group)
    return mean[: len(values)]
