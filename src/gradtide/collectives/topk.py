"""Everybody's largest entries, gathered by everybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradtide.bucket import Payload, Traits
from gradtide.collectives._entries import (
    Entries,
    Wire,
    check,
    entry_words,
    gather,
    gather_known,
    length,
    wire_dtype,
)
from gradtide.collectives.dense import Dense
from gradtide.ops import Flow, Group
from gradtide.select import Exact, Selector, Threshold


@dataclass(frozen=True)
class TopK(Traits):
    """All-gather of the k largest entries of every rank, summed where they are.

    (P - 1) k entries a rank in one round, after a small one for the numbers of entries
    unless `select` finds exactly k. An entry is a value and an index of 16 bits: 1.5
    words for float32, 1 for `wire`. The mean has between k and P k entries, which is
    what makes the method slower the more ranks there are. Leaves behind what the rank
    itself did not select, and what `wire` rounds off. Buckets for which it does not
    pay (`pays`) are exchanged by `Dense`.
    """

    density: float = 0.01
    select: Selector = Threshold()  # noqa: RUF009  (frozen: not shared by mistake)
    wire: Wire = None

    def __post_init__(self) -> None:
        check("TopK", self.density, self.wire)

    def pays_below(self, size: int) -> float:
        return 2 / (size * entry_words(torch.float32, self.wire))

    def reduce(self, load: Payload, group: Group) -> Flow:
        n, dtype = len(load.flat), load.flat.dtype
        k = kept(self.density, n)
        if not pays(n, k, group.size, dtype, self.wire):
            return (yield from Dense(self.wire).reduce(load, group))
        where = self.select(load.salience, k, load.state)
        values = load.take(where, wire_dtype(dtype, self.wire))
        if isinstance(self.select, Exact):
            numbers = [k] * group.size
            gathering = gather_known(where, values, n, self.wire, group, numbers)
        else:
            gathering = gather(where, values, n, self.wire, group)
        union, sums = summed((yield from gathering), dtype)
        return load.mean_at(union, sums.div_(group.size))


def pays(n: int, k: int, size: int, dtype: torch.dtype, wire: Wire = None) -> bool:
    """Whether to gather k of n entries moves fewer bytes than a dense exchange.

    (P - 1) messages of k entries against 2 n (P - 1) / P values, both in `wire`: up to
    a density of 4 / (3 P) for float32, and 1 / P for a wire of 16 bits.
    """
    narrow = wire_dtype(dtype, wire)
    return size > 1 and length(k, n, narrow) * size < 2 * n * narrow.itemsize


def kept(density: float, n: int) -> int:
    """How many of n entries a density stands for: at least one."""
    return max(1, round(density * n))


def summed(entries: Sequence[Entries], dtype: torch.dtype) -> Entries:
    """The sum of entries: sorted unique indices, and values of `dtype`.

    Added one rank after the other, so that the sums are the same everywhere.
    """
    everywhere = torch.cat([where for where, _ in entries])
    union, inverse = torch.unique(everywhere, return_inverse=True)
    sums = torch.zeros(len(union), dtype=dtype, device=union.device)
    places = torch.split(inverse, [len(where) for where, _ in entries])
    for place, (_, values) in zip(places, entries, strict=True):
        sums.index_add_(0, place, values.to(dtype))
    return union, sums
