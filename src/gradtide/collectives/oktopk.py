"""Near-optimal sparse all-reduce: sums of top entries, and of these the top again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.collectives import _entries
from gradtide.collectives._balance import could_pay, pays, recut, worth_moving
from gradtide.collectives._entries import Encoding, Selecting, Steps, kept
from gradtide.collectives._winners import rank_sums
from gradtide.collectives.dense import Dense
from gradtide.core.devices import on_device
from gradtide.core.ops import AllGather, AllToAll, Cut, Flow, Group, ToHost
from gradtide.core.payload import Payload, Traits, next_step
from gradtide.selectors.kernels import above
from gradtide.wire import codec_of, round_off


@dataclass(frozen=True)
class OkTopk(Selecting):
    """Find the k largest of the sums of every rank's k largest entries.

    This is Ok-Topk (Li and Hoefler, Near-optimal sparse allreduce for distributed deep
    learning, PPoPP 2022). The bucket is cut into one region a rank, so that every owner
    receives about as many entries: boundaries are the ranks' quantiles, averaged.
    Owners add up what arrives and rank the sums. Each tells the others some points of
    its ranking, from which all compute how many winners every owner has: k in all, in
    every step. (The paper gathers the whole union instead, now and then, and follows
    with a fixed rate.)

    Cost, with P ranks: four rounds of P - 1 messages: counts, entries, rankings,
    winners. One more when regions are cut, and one where winners are moved to even out
    the last round. At a density of 0.01 a rank sends 10.1 k (P - 1) / P bytes for
    float32, 6.1 k (P - 1) / P with `wire`, some numbers to every peer, and at most half
    as many for k / P winners that are moved. The bytes do not grow with the number of
    ranks.

    Residual: all but what was selected here and won. Nothing is taken out before the
    second half, so a flow that is closed at its cut leaves every finite entry.
    Infinities and NaNs win and arrive in the mean, and the bucket is rid of all of them
    at once.

    Args:
        density: The share of a bucket's entries that a rank selects, see `Selecting`.
        select: The selector that finds the entries, see `Selecting`.
        wire: In what values travel, see `Selecting`. What that takes off goes to the
            residual, that of the mean to its owner's; a value
            that the cast makes infinite arrives so.
        rebalance: Steps between new boundaries of regions, 1 or more. The default, 64,
            makes the additional round rare; a region that gets twice the average is cut
            anew at once all the same.
        refresh: Steps between rankings of all sums, 1 or more. In between owners rank
            only what lies above half of the last threshold, which takes less time. With
            more steps, thresholds that fall quickly are followed later.

    Raises:
        ValueError: A field is outside its range.
    """

    rebalance: int = 64  # steps between new boundaries
    refresh: int = 32  # steps between rankings of everything

    @property
    def traits(self) -> Traits:
        # Indices are relative to regions, some of which are shorter.
        return Traits(alike=False, scans=True)

    def __post_init__(self) -> None:
        _entries.check(self, rebalance="steps", refresh="steps")

    def reduce(self, payload: Payload, group: Group) -> Flow:
        flat, state = payload.flat, payload.state
        k = kept(self.density, len(flat))
        if not pays(len(flat), k, group.size):
            return (yield from Dense(self.wire).reduce(payload, group))
        step = next_step(state)
        where = self.select(payload.selection_scores, k, state)
        values, codec = flat.index_select(0, where), codec_of(self.wire, flat.dtype)
        payload.check_finite(values.to(codec.dtype))

        if self._unbalanced(step, len(flat), state, group):
            yield from _balance(where, len(flat), state, group)
        bounds, spans = state["bounds"].tolist(), state["bounds"].diff().tolist()
        regions = [Encoding(span, codec, flat.dtype) for span in spans]
        arrived = yield from _split(payload, where, values, bounds, regions, group)
        received = sum(len(part) for part, _ in arrived)
        sums = _entries.summed(arrived, flat.dtype)

        fresh = step % self.refresh == 0
        numbers, won = yield from rank_sums(sums, received, k, fresh, state, group)
        part = sums[1].index_select(0, won).div_(group.size)
        lost = None if codec.exact else round_off(part, codec)
        yield Cut(part)

        if lost is not None:
            # A mean that was rounded to zero is not delivered: all of it stays.
            lost.mul_(group.size * (part != 0))
        winner = sums[0].index_select(0, won)
        spread = yield from _spread(winner, part, numbers, regions, group)
        places = [
            at.to(where.dtype) + begin
            for (at, _), begin in zip(spread, bounds, strict=False)
        ]
        there = torch.cat([there for _, there in spread])
        mean = payload.sparse_mean(torch.cat(places), there)
        _clear(payload, where, values, mean)
        if lost is not None:
            payload.add_residual(places[group.rank], lost)
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
    payload: Payload,
    where: Tensor,
    values: Tensor,
    bounds: list[int],
    regions: list[Encoding],
    group: Group,
) -> Steps:
    """Send every entry to the owner of its region; returns the entries for here.

    The values are left with what the codec rounded off.
    """
    own = regions[group.rank]
    edges = on_device(bounds, where.dtype, where.device)
    leaving = torch.searchsorted(where, edges).diff()
    ones = [1] * group.size
    arriving = yield AllToAll(leaving, ones, ones)
    bad = (~torch.isfinite(values.to(own.codec.dtype))).count_nonzero()
    known = yield ToHost(torch.cat([leaving, arriving, bad[None]]))
    *both, num_bad = known.tolist()
    if num_bad:
        # There may be more than were selected; they must not come back every step.
        payload.flat.nan_to_num_(0.0, 0.0, 0.0)
    sizes, numbers = both[: group.size], both[group.size :]
    pieces = zip(torch.split(where, sizes), bounds, strict=False)
    inside = [at - begin for at, begin in pieces]
    rows = zip(inside, torch.split(values, sizes), strict=True)
    messages = [region.pack(row) for region, row in zip(regions, rows, strict=True)]
    return (yield from _entries.exchange(messages, numbers, own))


def _spread(
    where: Tensor,
    part: Tensor,
    numbers: list[int],
    regions: list[Encoding],
    group: Group,
) -> Steps:
    """Everybody's winners, in rank order, relative to their regions."""
    message = regions[group.rank].pack((where, part))
    lengths = [region.length(n) for region, n in zip(regions, numbers, strict=True)]
    stream = yield from _gather_even(message, lengths, group)
    return _entries.unpack_all(stream, numbers, regions)


def _clear(payload: Payload, where: Tensor, rest: Tensor, mean: Tensor) -> None:
    """Take out what was selected here and won, all but the rest that the wire took
    off: where the mean is not zero.

    Looking the entries up in the mean costs a sixth of a sorted intersection. A
    winner whose mean was rounded to zero has not been delivered, and stays.
    """
    heard = mean.index_select(0, where)
    delivered = above(heard, 0.0, len(heard))
    left = rest.index_select(0, delivered)
    payload.flat.index_copy_(0, where.index_select(0, delivered).long(), left)
    payload.num_sent += len(delivered)


def _balance(
    where: Tensor, numel: int, state: dict[str, Tensor], group: Group
) -> Steps:
    """Cut regions that hold equally many selected entries: averaged quantiles."""
    size = group.size
    at = (
        torch.arange(1, size, device=where.device, dtype=torch.int64)
        * len(where)
        // size
    )
    cuts = yield from _entries.tell(where.index_select(0, at).long(), group)
    cuts = yield ToHost(cuts.sum(0) // size)
    state["bounds"] = torch.tensor(
        [0, *cuts.tolist(), numel], dtype=torch.int64, device="cpu"
    )


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
