"""As TopKA2A, but the mean travels sparsely where that is shorter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradtide.bucket import Payload, rounded_off
from gradtide.collectives._entries import (
    Wire,
    check,
    counts,
    entry_words,
    gather_known,
    wire_dtype,
)
from gradtide.collectives.dense import Dense
from gradtide.collectives.topka2a import (
    collect,
    in_whole,
    kept_of_part,
    spread,
)
from gradtide.ops import Cut, Flow, Group
from gradtide.select import Selector, Threshold


@dataclass(frozen=True)
class TopkDSA:
    """`TopKA2A` with a second half of entries where their union is sparse enough.

    SparCML's split all-gather (Renggli et al., SC 2019), with equal parts: all ranks
    learn how many entries every part's mean has, and by the same numbers (`tail_pays`)
    gather either these entries or the whole mean.

    Three rounds, between 3 k (P - 1) / P words a rank (for float32, and if all ranks
    chose the same entries) and the (1.5 k + n) (P - 1) / P of TopKA2A, plus P numbers.
    Leaves behind what was not selected; at the `Cut` the part is the values of the
    union's entries, or the dense part. Hyper-parameters and roundings are TopKA2A's.
    """

    density: float = 0.01
    select: Selector = Threshold()  # noqa: RUF009  (frozen: not shared by mistake)
    wire: Wire = None

    def __post_init__(self) -> None:
        check("TopkDSA", self.density, self.wire)

    def reduce(self, load: Payload, group: Group) -> Flow:
        flat, wire = load.flat, self.wire
        kept = kept_of_part(flat, self.density, wire, group)
        if not kept:
            return (yield from Dense(wire).reduce(load, group))
        span = len(flat) // group.size
        part = flat.new_zeros(span)
        yield from collect(part, load, kept, self.select, wire, group)
        where = part.nonzero().squeeze(1)
        rows = yield from counts([len(where)], part, group)
        numbers = [row[0] for row in rows]
        if not tail_pays(sum(numbers), len(flat), entry=entry_words(flat.dtype, wire)):
            return (yield from spread(part, load, wire, group))
        values = part[where]
        narrow = wire_dtype(flat.dtype, wire)
        if narrow != flat.dtype:
            rest = rounded_off(values, values.to(narrow))
            values.sub_(rest)
            load.give_back(where + group.rank * span, rest * group.size)
        yield Cut(values)
        found = yield from gather_known(
            where.to(torch.int32), values, span, wire, group, numbers
        )
        everywhere = in_whole([idx for idx, _ in found], span, len(flat))
        return load.mean_at(everywhere, torch.cat([row for _, row in found]))


def tail_pays(union: int, n: int, *, entry: float = 2.0) -> bool:
    """Whether gathering `union` entries of a mean of n elements beats the whole of it.

    An entry is `entry` words long. If P ranks choose at random, with density rho, their
    union's density is 1 - (1 - rho)^P: it pays below rho = 1 - (1 - 1/entry)^(1/P).
    """
    return entry * union < n
