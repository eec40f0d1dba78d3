"""Near-optimal sparse all-reduce: sums of top entries, and of these the top again."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradtide.bucket import Payload, Traits, count, rounded_off
from gradtide.collectives import _entries
from gradtide.collectives._balance import could_pay, pays, recut, worth_moving
from gradtide.collectives._entries import Steps, Wire
from gradtide.collectives._winners import add_up, rank_sums, tell
from gradtide.collectives.dense import Dense
from gradtide.ops import AllGather, AllToAll, Cut, Flow, Group, ToHost
from gradtide.select import Selector, Threshold
from gradtide.select.kernels import above


@dataclass(frozen=True)
class OkTopk(Traits):
    """The k largest of the sums of every rank's k largest (Li and Hoefler, PPoPP 2022).

    The bucket is cut into one region a rank, so that each owner receives about as many
    of the selected entries: boundaries are the ranks' quantiles, averaged every
    `rebalance` steps, or sooner when a region gets SKEW times the average. Owners add
    up what arrives and rank the sums. Each tells the others POINTS of its ranking, from
    which all compute how many winners every owner has: k in all, on every step, at any
    scale. (The paper gathers the whole union instead, now and then, and follows with a
    fixed rate.) Owners rank only what lies above half of the last step's threshold;
    everything every `refresh` steps.

    1.5 k (P - 1) / P words to the owners and as much with the winners, at 2 bytes an
    index; at most another 1.5 k / P where winners are moved to even out the gather. One
    round of counts, one of rankings, one more when regions are cut. Where it cannot pay
    (`pays`) the bucket is sent dense.

    Leaves behind all but what won and was selected here. Nothing is taken out before
    the second half: a flow closed at its cut leaves every finite entry. Infinities and
    NaNs win and arrive in the mean; the bucket is rid of all of them at once.

    What `wire` ("bf16", "fp16") rounds off is left with the sender, that of the mean
    with its owner; a value that `wire` makes infinite arrives so, and buckets that
    travel dense lose their roundings.
    """

    density: float = 0.01
    select: Selector = Threshold()  # noqa: RUF009  (frozen: cannot be shared by mistake)
    wire: Wire = None
    rebalance: int = 64  # steps between new boundaries
    refresh: int = 32  # steps between rankings of everything

    alike = False  # indices are relative to regions, some of which are shorter

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(
                f"OkTopk(density={self.density}): density is a share, above 0 and at "
                "most 1"
            )
        for name in ("rebalance", "refresh"):
            if (steps := getattr(self, name)) < 1:
                raise ValueError(
                    f"OkTopk({name}={steps}): {name} counts steps, 1 or more"
                )
        _entries.check_wire("OkTopk", self.wire)

    def reduce(self, load: Payload, group: Group) -> Flow:
        flat, state = load.flat, load.state
        k = max(1, round(self.density * flat.numel()))
        if not pays(flat.numel(), k, group.size):
            return (yield from Dense(self.wire).reduce(load, group))
        step = count(state)
        where = self.select(load.salience, k, state)
        values = flat.index_select(0, where)
        narrow = values.to(_entries.wire_dtype(flat.dtype, self.wire))
        load.check(narrow)

        if self._unbalanced(step, flat.numel(), state, group):
            yield from _balance(where, flat.numel(), state, group)
        bounds = state["bounds"].tolist()
        arrived = yield from self._split(load, where, narrow, bounds, group)
        received = sum(len(part) for part, _ in arrived)
        sums = add_up(arrived, flat.dtype)

        fresh = step % self.refresh == 0
        numbers, won = yield from rank_sums(sums, received, k, fresh, state, group)
        part = sums[1].index_select(0, won).div_(group.size)
        yield Cut(part)

        winner = sums[0].index_select(0, won)
        spread = yield from self._spread(winner, part, numbers, bounds, group)
        everywhere = torch.cat(
            [
                at.to(where.dtype) + begin
                for (at, _), begin in zip(spread, bounds[:-1], strict=True)
            ]
        )
        mean = load.mean_at(everywhere, torch.cat([there for _, there in spread]))
        self._clear(load, where, rounded_off(values, narrow), mean)
        if narrow.dtype != flat.dtype:
            heard = spread[group.rank][1].to(part.dtype)
            lost = rounded_off(part, heard).mul_(group.size * (heard != 0))
            load.give_back(winner.to(where.dtype) + bounds[group.rank], lost)
        return mean

    def _unbalanced(
        self, step: int, numel: int, state: dict[str, Tensor], group: Group
    ) -> bool:
        bounds = state.get("bounds")
        return (
            bounds is None
            or len(bounds) != group.size + 1
            or int(bounds[-1]) != numel
            or step % self.rebalance == 0
            or bool(state["skewed"])
        )

    def _split(
        self,
        load: Payload,
        where: Tensor,
        values: Tensor,
        bounds: list[int],
        group: Group,
    ) -> Steps:
        """Send every entry to the owner of its region; returns the entries for here."""
        edges = torch.tensor(bounds, dtype=where.dtype, device=where.device)
        leaving = torch.searchsorted(where, edges).diff()
        ones = [1] * group.size
        arriving = yield AllToAll(leaving, ones, ones)
        bad = (~torch.isfinite(values)).count_nonzero()
        known = yield ToHost(torch.cat([leaving, arriving, bad[None]]))
        *both, num_bad = known.tolist()
        if num_bad:
            # There may be more than were selected; they must not come back every step.
            load.flat.nan_to_num_(0.0, 0.0, 0.0)
        sizes = both[: group.size]
        spans = [end - begin for begin, end in pairwise(bounds)]
        rows = [
            (at - begin, there)
            for at, there, begin in zip(
                torch.split(where, sizes),
                torch.split(values, sizes),
                bounds[:-1],
                strict=True,
            )
        ]
        return (
            yield from _entries.exchange(
                rows, spans, self.wire, group, both[group.size :]
            )
        )

    def _spread(
        self,
        where: Tensor,
        part: Tensor,
        numbers: list[int],
        bounds: list[int],
        group: Group,
    ) -> Steps:
        """Everybody's winners, in rank order, relative to their regions."""
        spans = [end - begin for begin, end in pairwise(bounds)]
        dtype = _entries.wire_dtype(part.dtype, self.wire)
        message = _entries.pack(where, part, spans[group.rank], dtype)
        lengths = [
            _entries.length(number, span, dtype)
            for number, span in zip(numbers, spans, strict=True)
        ]
        stream = yield from _gather_even(message, lengths, group)
        return [
            _entries.unpack(piece, number, span, dtype)
            for piece, number, span in zip(
                torch.split(stream, lengths), numbers, spans, strict=True
            )
        ]

    def _clear(self, load: Payload, where: Tensor, rest: Tensor, mean: Tensor) -> None:
        """Take out what was selected here and won, all but the rest that the wire took
        off: where the mean is not zero.

        Looking the entries up in the mean costs a sixth of a sorted intersection. A
        winner whose mean was rounded to zero has not been delivered, and stays.
        """
        heard = mean.index_select(0, where)
        delivered = above(heard, 0.0, len(heard))
        left = rest.index_select(0, delivered)
        load.flat.index_copy_(0, where.index_select(0, delivered).long(), left)
        load.taken += len(delivered)


def _balance(
    where: Tensor, numel: int, state: dict[str, Tensor], group: Group
) -> Steps:
    """Cut regions that hold equally many selected entries: averaged quantiles."""
    size = group.size
    at = torch.arange(1, size, device=where.device) * len(where) // size
    cuts = yield from tell(where.index_select(0, at).long(), group)
    cuts = yield ToHost(cuts.sum(0) // size)
    state["bounds"] = torch.tensor([0, *cuts.tolist(), numel])


def _gather_even(message: Tensor, lengths: list[int], group: Group) -> Steps:
    """Everybody's bytes one after the other, evened out first where that is quicker."""
    if not sum(lengths):
        return message
    if could_pay(lengths):
        moves = recut(lengths, _entries.ALIGN)
        if worth_moving(moves):
            arriving = [row[group.rank] for row in moves]
            message = yield AllToAll(message, moves[group.rank], arriving)
            lengths = [sum(column) for column in zip(*moves, strict=True)]
    return (yield AllGather(message, lengths))
