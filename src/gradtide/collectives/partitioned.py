"""All ranks send their values at the same indices; each finds some of the indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradtide.collectives._entries import Steps, check, kept
from gradtide.collectives._indices import HEAD, gather_indices
from gradtide.collectives.dense import Dense, averaged
from gradtide.collectives.partitions import Even, Partition, Plan
from gradtide.core.devices import on_device
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Payload, Traits, next_step
from gradtide.selectors import kernels
from gradtide.selectors.follow import estimate
from gradtide.selectors.indices import everything, index_dtype
from gradtide.wire import Wire, codec_of

SMALL = 4096  # elements: up to here torch.topk is as fast as a threshold
SAMPLE = 256  # sampled entries above a threshold that is estimated afresh


@dataclass(frozen=True)
class PartitionedTopK:
    """Agree on about k indices, and average all ranks' values there: partitioned top-k.

    In every step a rank looks for large entries in one bin of `partition`, (rank +
    step) mod P: MiCRO, ExDyna or DEFT, all by Yoon and Oh. So a rank searches n/P
    elements, and no index is found twice. A bin gives the largest entries of each of
    its segments, as many as planned, or fewer if it has no more that are not zero.
    Thresholds only say which entries to look at; one that fits no longer is drawn from
    a sample again, within the step.

    Cost, with P ranks: three rounds of P - 1 messages: indices, and the two halves of a
    dense exchange of the values. At a density of 0.01 a rank sends 9.1 k (P - 1) / P
    bytes for float32, 5.1 k (P - 1) / P with `wire`: of these 1.1 k are indices. A
    bucket for which this would not send fewer bytes travels by `Dense`, and then the
    casts of `wire` are lost.

    Residual: on every rank, all that is outside the union. Where steps are exchanged
    (LOCAL) an entry also stays if its selection score is below the threshold of its
    segment here: what another rank found by chance is mostly noise. Every rank reads
    its whole bucket once for values that are not finite: these reach the non-finite
    guard at once, and travel when their segment is next searched.

    Args:
        density: The share k/n of the n entries of a bucket that travel, see
            `Selecting`.
        partition: Who searches where, and for how many entries: `Even()`, `Dynamic()`
            or `ByNorm()`. The default is the one that learns nothing; the recipes
            "micro", "exdyna" and "deft" stand for the three.
        wire: In what values travel, see `Selecting`. What it takes off the mean goes
            to the residual of the part's owner.

    Raises:
        ValueError: A field is outside its range.
    """

    density: float = 0.01
    partition: Partition = Even()  # noqa: RUF009  (frozen: cannot be shared by mistake)
    wire: Wire = None

    traits = Traits(searches_part=True, scans=True)

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.partition, type) or not hasattr(self.partition, "learn"):
            raise ValueError(
                f"PartitionedTopK(partition={self.partition!r}): use Even(), Dynamic() "
                "or ByNorm()"
            )

    def reduce(self, payload: Payload, group: Group) -> Flow:
        x, k = payload.flat, kept(self.density, len(payload.flat))
        codec = codec_of(self.wire, x.dtype)
        if not pays(len(x), k, group.size, codec.width):
            return (yield from Dense(self.wire).reduce(payload, group))
        turn = next_step(payload.state)
        plan = self.partition.plan(payload, k, group.size, turn)
        payload.check_all_finite(codec.dtype)
        scores = payload.selection_scores
        union = yield from self._agree(payload, scores, plan, turn, group)
        if scores is x:
            values = payload.pop_entries(union, codec.dtype)
        else:
            values = _take_due(payload, scores, union, plan, codec.dtype)
        mean = yield from averaged(values, payload, codec, group, union)
        return payload.sparse_mean(union, mean)

    def _agree(
        self, payload: Payload, scores: Tensor, plan: Plan, turn: int, group: Group
    ) -> Steps:
        """The union of what the ranks select; reports are learned from."""
        thresholds = payload.state.get(
            "thresholds", torch.empty(0, dtype=torch.float32, device="cpu")
        ).tolist()
        if len(thresholds) != len(plan.quotas):
            thresholds = [math.nan] * len(plan.quotas)
        bins = [plan.bins[(turn + rank) % group.size] for rank in range(group.size)]
        own = bins[group.rank]
        segments = [scores[plan.edges[s] : plan.edges[s + 1]] for s in own]
        sought = [(plan.quotas[s], thresholds[s]) for s in own]
        found, following = pick(segments, sought, turn)
        norms = [self.partition.measure(segment) for segment in segments]
        both = [
            torch.stack([threshold.float(), norm.float()])
            for threshold, norm in zip(following, norms, strict=True)
        ]
        told = gather_indices(found, both, plan, bins, payload.flat.device, group)
        rows, everybody = yield from told
        payload.state["thresholds"] = torch.tensor(
            [r.threshold for r in everybody], dtype=torch.float32, device="cpu"
        )
        self.partition.learn(payload, plan, everybody)
        first = -turn % group.size  # the rank with bin 0: segments in their order
        return torch.cat([*rows[first:], *rows[:first]])


def _take_due(
    payload: Payload, scores: Tensor, union: Tensor, plan: Plan, dtype: torch.dtype
) -> Tensor:
    """The entries at `union` that count as much here as where they were found, taken
    out; and zeros for the others, which stay."""
    ends = on_device(plan.edges[1:], union.dtype, union.device)
    segment = torch.bucketize(union, ends, right=True)
    thresholds = payload.state["thresholds"].to(scores, non_blocking=True)
    # Not where there is no threshold yet: NaN.
    small = scores.index_select(0, union).abs() < thresholds.index_select(0, segment)
    due = (~small).nonzero().squeeze(1)
    values = payload.flat.new_zeros(len(union))
    return values.index_copy_(
        0, due, payload.pop_entries(union.index_select(0, due), dtype)
    )


def pays(n: int, k: int, size: int, width: float = 4) -> bool:
    """Whether agreeing on k of n elements moves fewer bytes than sending all.

    What is saved, 2 (n - k) values, must be more than the indices (as in `entry_words`
    2 bytes each), a report and the alignment from every rank. One rank has nothing to
    save.
    """
    return size > 1 and 2 * width * (n - k) > 2 * k + size * (HEAD + 8)


def pick(
    segments: Sequence[Tensor], sought: Sequence[tuple[int, float]], seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The largest of every segment (1-D), and thresholds to find them by the next time.

    Sorted indices (int32), and numbers on the device. `sought` are how many to find of
    each (quota), and a threshold (NaN if unknown) that says what to look at; it should
    leave a quarter more, and 0 leaves all that is not zero. NaN counts as largest.
    `seed` is that of the sample for a threshold that does not fit.

    While thresholds fit, the host waits for the device once, for all segments.
    """
    pairs = zip(segments, sought, strict=True)
    looks = [_look(x, quota, threshold, seed) for x, (quota, threshold) in pairs]
    if not looks:
        return [], []
    numbers = torch.stack([look.number for look in looks]).tolist()
    found = [look.take(number) for look, number in zip(looks, numbers, strict=True)]
    return [where for where, _ in found], [threshold for _, threshold in found]


class _Look(NamedTuple):
    """A segment that was looked through: `take` wants the number that was seen."""

    number: Tensor
    take: Callable[[int], tuple[Tensor, Tensor]]


def _look(x: Tensor, quota: int, threshold: float, seed: int) -> _Look:
    spare = quota + quota // 4 + 1
    if quota in (0, len(x)):
        every, same = everything(x[:quota]), x.new_full((), threshold)
        return _Look(_none(x), lambda _: (every, same))
    if len(x) <= max(SMALL, spare):
        return _exactly(x, quota, min(spare, len(x)))
    limit = 4 * spare
    scan = kernels.scan(x, threshold, limit) if threshold >= 0 else None

    def take(number: int) -> tuple[Tensor, Tensor]:
        if scan is not None and _fits(number, quota, limit, threshold):
            found, known = scan.indices[:number], threshold
        else:
            known, _ = estimate(x, spare, SAMPLE, seed)
            found = kernels.above(x, known, limit)
            if not _fits(len(found), quota, limit, known):
                look = _exactly(x, quota, spare)
                return look.take(int(look.number))
        size = x.index_select(0, found).abs()  # faster than brackets
        following = _next(size, spare, known)
        if len(found) > quota:
            found = kernels.top(found, size, quota)
        return found, following

    return _Look(_none(x) if scan is None else scan.number, take)


def _none(x: Tensor) -> Tensor:
    return x.new_zeros((), dtype=torch.int64)


def _fits(found: int, quota: int, limit: int, threshold: float) -> bool:
    return (found >= quota or threshold == 0) and found < limit


def _exactly(x: Tensor, quota: int, spare: int) -> _Look:
    values, largest = torch.topk(x.abs(), spare)

    def take(number: int) -> tuple[Tensor, Tensor]:
        return largest[:number].sort().values.to(index_dtype(len(x))), values[-1]

    return _Look((values[:quota] != 0).sum(), take)


def _next(size: Tensor, spare: int, threshold: float) -> Tensor:
    """The threshold, moved half the way to where `spare` entries would be above it.

    The tail's slope is Hill's: the mean of log(size / threshold).
    """
    if threshold == 0:
        return size.new_full((), 0.0 if len(size) <= spare else math.nan)
    slope = size.log().mean().double() - math.log(threshold)
    move = (slope * (0.5 * math.log(len(size) / spare))).clamp_(-1.0, 1.0)
    return move.where(slope.isfinite(), move.new_zeros(())).exp_() * threshold
