"""Everybody's largest entries, gathered by everybody."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradtide.collectives import _entries
from gradtide.collectives._entries import Selecting, Wire, kept, wire_dtype
from gradtide.collectives.dense import Dense
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Payload
from gradtide.selectors import Exact


@dataclass(frozen=True)
class TopK(Selecting):
    """Gather every rank's k largest entries on every rank, and add them up there.

    Deep Gradient Compression (Lin et al., ICLR 2018) exchanges its gradients in this
    way.

    Cost, with P ranks: one round of P - 1 messages, after a small one for the numbers
    of entries unless `select` is `Exact()`. A rank sends 6 k (P - 1) bytes for float32
    (4 for a value, 2 for its index), 4 k (P - 1) with `wire`. The mean has between k
    and P k entries: so the bytes grow with the number of ranks. A bucket for which this
    would not send fewer bytes travels by `Dense`, and then the casts of `wire` are
    lost.

    Residual: what the rank itself did not select.

    Args:
        density: The share of a bucket's entries that a rank selects, see `Selecting`.
        select: The selector that finds the entries, see `Selecting`.
        wire: What values are cast to when they travel, see `Selecting`. What a cast
            takes off goes to the residual.

    Raises:
        ValueError: A field is outside its range.
    """

    def pays_below(self, size: int) -> float:
        return 2 / (size * _entries.entry_words(torch.float32, self.wire))

    def reduce(self, payload: Payload, group: Group) -> Flow:
        n, dtype = len(payload.flat), payload.flat.dtype
        k = kept(self.density, n)
        if not pays(n, k, group.size, dtype, self.wire):
            return (yield from Dense(self.wire).reduce(payload, group))
        where = self.select(payload.selection_scores, k, payload.state)
        values = payload.pop_entries(where, wire_dtype(dtype, self.wire))
        if isinstance(self.select, Exact):
            numbers = [k] * group.size
        else:
            numbers = yield from _entries.counts(where, group)
        mine = where, values
        found = yield from _entries.gather(mine, numbers, n, self.wire, group)
        union, sums = _entries.summed(found, dtype)
        return payload.sparse_mean(union, sums.div_(group.size))


def pays(n: int, k: int, size: int, dtype: torch.dtype, wire: Wire = None) -> bool:
    """Whether to gather k of n entries moves fewer bytes than a dense exchange.

    (P - 1) messages of k entries against 2 n (P - 1) / P values, both in `wire`: up to
    a density of 4 / (3 P) for float32, and 1 / P for a wire of 16 bits.
    """
    narrow = wire_dtype(dtype, wire)
    return size > 1 and _entries.length(k, n, narrow) * size < 2 * n * narrow.itemsize
