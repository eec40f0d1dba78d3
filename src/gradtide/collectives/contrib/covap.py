"""A part of a bucket in every step, in turn: nothing is selected."""

from __future__ import annotations

from dataclasses import dataclass

from gradtide.collectives._entries import check
from gradtide.collectives.dense import Dense, averaged
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Payload, Traits, next_step
from gradtide.selectors.indices import everything
from gradtide.wire import Wire, codec_of


@dataclass(frozen=True)
class COVAP:
    """Average one part of a bucket in every step, the next one in the step after.

    This is COVAP (2023, arXiv:2311.04499), whose filter lets every bucket travel in one
    of `interval` steps. Here it is one of so many parts of every bucket, so that all
    steps send the same. What waits counts whole when it travels; the published method
    lets it count by a factor that rises to 1, and forgets the rest.

    Cost, with P ranks: two rounds of P - 1 messages, the halves of a dense exchange. A
    rank sends 8 (P - 1) / P n / interval bytes for float32, less with `wire`. No time
    is spent on selection.

    Residual: on every rank, all other parts. Every rank reads its whole bucket once for
    values that are not finite: these reach the non-finite guard at once.

    Args:
        interval: In how many steps all of a bucket has travelled once, 1 or more; 1 is
            `Dense`. More send less, and let everything wait longer. The default is 4;
            published is the time of a dense exchange by that of computing, rounded up.
        wire: In what values travel, see `Dense`. What it takes off goes to the
            residual, that of the mean to the part's owner's. None, the default, rounds
            nothing.

    Raises:
        ValueError: A field is outside its range.
    """

    interval: int = 4
    wire: Wire = None

    traits = Traits(depends_on="size")

    def __post_init__(self) -> None:
        check(self, interval="steps")

    def reduce(self, payload: Payload, group: Group) -> Flow:
        flat, codec = payload.flat, codec_of(self.wire, payload.flat.dtype)
        units = len(flat) // group.size
        if group.size == 1 or min(self.interval, units) < 2:
            return (yield from Dense(self.wire).reduce(payload, group))
        turn = next_step(payload.state) % self.interval
        begin, end = (
            group.size * (units * i // self.interval) for i in (turn, turn + 1)
        )
        payload.check_all_finite(codec.dtype)
        where = everything(flat[begin:end]) + begin
        values = payload.pop_entries(where, codec.dtype)
        mean = yield from averaged(values, payload, codec, group, where)
        return payload.sparse_mean(where, mean)
