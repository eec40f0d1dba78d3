"""Every part's largest entries go to its owner; the mean travels as entries, if few."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradtide.collectives import _entries
from gradtide.collectives._entries import Encoding, Selecting, entry_words
from gradtide.collectives.dense import Dense
from gradtide.collectives.topka2a import collect, in_whole, kept_of_part, spread
from gradtide.core.ops import Cut, Flow, Group
from gradtide.core.payload import Payload
from gradtide.wire import codec_of, round_off


@dataclass(frozen=True)
class TopkDSA(Selecting):
    """Do as `TopKA2A`, but gather the mean as entries where they are few.

    This is the split all-gather of SparCML (Renggli et al., SC 2019), with equal parts.
    All ranks then learn how many entries every part's mean has, and by the same numbers
    they gather either these entries or the whole mean.

    Cost, with P ranks: three rounds of P - 1 messages. At a density of 0.01 a rank
    sends for float32 from 10.1 k (P - 1) / P bytes, if all ranks select the same
    entries, to (5.1 k + 4 n) (P - 1) / P, and 8 (P - 1) bytes for the numbers.

    Residual: what was not selected.

    Args:
        density: The share of a bucket's entries that a rank selects, see `Selecting`.
        select: The selector that finds the entries, see `Selecting`.
        wire: In what values travel, see `TopKA2A`.

    Raises:
        ValueError: A field is outside its range.
    """

    def reduce(self, payload: Payload, group: Group) -> Flow:
        flat, wire = payload.flat, self.wire
        kept = kept_of_part(flat, self.density, wire, group)
        if not kept:
            return (yield from Dense(wire).reduce(payload, group))
        span = len(flat) // group.size
        part, codec = flat.new_zeros(span), codec_of(wire, flat.dtype)
        yield from collect(part, payload, kept, self.select, codec, group)
        where = part.nonzero().squeeze(1)
        numbers = yield from _entries.counts(where, group)
        if not tail_pays(sum(numbers), len(flat), entry=entry_words(flat.dtype, wire)):
            return (yield from spread(part, payload, codec, group))
        values = part[where]
        if not codec.exact:
            rest = round_off(values, codec)
            payload.add_residual(where + group.rank * span, rest * group.size)
        yield Cut(values)
        encoding = Encoding(span, codec, flat.dtype)
        message = encoding.pack((where.to(torch.int32), values))
        found = yield from _entries.gather(message, numbers, encoding)
        everywhere = in_whole([idx for idx, _ in found], span, len(flat))
        return payload.sparse_mean(everywhere, torch.cat([row for _, row in found]))


def tail_pays(union: int, n: int, *, entry: float = 2.0) -> bool:
    """Whether gathering `union` entries of a mean of n elements beats the whole of it.

    An entry is `entry` words long. If P ranks choose at random, with density rho, their
    union's density is 1 - (1 - rho)^P: it pays below rho = 1 - (1 - 1/entry)^(1/P).
    """
    return entry * union < n
