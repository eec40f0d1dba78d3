"""Everybody's largest entries, gathered by everybody."""

from __future__ import annotations

from dataclasses import dataclass

from gradtide.collectives import _entries
from gradtide.collectives._entries import Encoding, Selecting, kept
from gradtide.collectives.dense import Dense, pays
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Payload
from gradtide.selectors import Exact
from gradtide.wire import codec_of


@dataclass(frozen=True)
class TopK(Selecting):
    """Gather every rank's k largest entries on every rank, and add them up there.

    Deep Gradient Compression (Lin et al., ICLR 2018) exchanges its gradients in this
    way.

    Cost, with P ranks: one round of P - 1 messages, after a small one for the numbers
    of entries unless `select` is `Exact()`. At a density of 0.01 a rank sends 5.1 k (P
    - 1) bytes for float32 (4 for a value, 1.1 for its index), 3.1 k (P - 1) with
    `wire`. The mean has between k and P k entries: so the bytes grow with the number of
    ranks.

    Residual: what the rank itself did not select.

    Args:
        density: The share of a bucket's entries that a rank selects, see `Selecting`.
        select: The selector that finds the entries, see `Selecting`.
        wire: In what values travel, see `Selecting`.

    Raises:
        ValueError: A field is outside its range.
    """

    def pays_below(self, size: int) -> float:
        return _entries.density_of_share(2 / size, self.wire)

    def reduce(self, payload: Payload, group: Group) -> Flow:
        n, dtype = len(payload.flat), payload.flat.dtype
        k, codec = kept(self.density, n), codec_of(self.wire, dtype)
        encoding = Encoding(n, codec, dtype)
        if not pays((group.size - 1) * encoding.length(k), n, group.size, codec):
            return (yield from Dense(self.wire).reduce(payload, group))
        where = self.select(payload.selection_scores, k, payload.state)
        values = payload.pop_entries(where, codec.dtype)
        message = encoding.pack((where, values))
        if not codec.exact:
            payload.add_residual(where, values)
        if isinstance(self.select, Exact):
            numbers = [k] * group.size
        else:
            numbers = yield from _entries.counts(where, group)
        found = yield from _entries.gather(message, numbers, encoding)
        union, sums = _entries.summed(found, dtype)
        return payload.sparse_mean(union, sums.div_(group.size))
