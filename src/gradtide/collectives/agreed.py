"""All ranks send their values at the same indices; each finds some of the indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtide.bucket import Payload, Traits, count, rounded_off
from gradtide.collectives._entries import Steps, Wire, check, wire_dtype
from gradtide.collectives._indices import HEAD, gather_indices
from gradtide.collectives.dense import Dense
from gradtide.collectives.partitions import Even, Partition, Plan, Report
from gradtide.ops import Cut, Flow, Group
from gradtide.select.follow import estimate
from gradtide.select.kernels import above, everything, index_dtype

SMALL = 4096  # elements: up to here torch.topk is as fast as a threshold
SAMPLE = 256  # sampled entries above a threshold that is estimated afresh


@dataclass(frozen=True)
class Agreed(Traits):
    """The ranks agree on about k indices, and average their values there.

    Each rank looks for large entries in a bin of its own, (rank + step) mod P of
    `partition`: MiCRO (`Even`), ExDyna (`Dynamic`) or DEFT (`ByNorm`), all by Yoon and
    Oh. So a rank searches n/P elements, and no index is found twice: the union has k
    indices whatever P is. One all-gather of messages whose lengths all ranks know, then
    a reduce-scatter and an all-gather of the values: three rounds of P - 1 messages,
    (2.5 k + n / 2^16) (P - 1) / P words a rank for float32.

    A bin gives the largest entries of each of its segments, exactly as many as planned,
    or fewer if it has no more that are not zero: thresholds only say which entries to
    look at, and are drawn from a sample again when they fit no longer, within the step.

    Leaves behind, on every rank, all that is outside the union; and where entries are
    weighed, what counts for less here than the threshold of its segment: a chance find
    of another rank would have all send what is mostly noise. With `wire` ("bf16",
    "fp16") what values are rounded by stays behind, too. Every rank reads its whole
    bucket once for values that are not finite; these raise the alarm at once, and
    travel when their segment is next looked through. Buckets for which this does not
    pay (`pays`) are sent by `Dense`.
    """

    density: float = 0.01
    partition: Partition = Even()  # noqa: RUF009  (frozen: cannot be shared by mistake)
    wire: Wire = None

    searches_part = True

    def __post_init__(self) -> None:
        check("Agreed", self.density, self.wire)
        if isinstance(self.partition, type) or not hasattr(self.partition, "learn"):
            raise ValueError(
                f"Agreed(partition={self.partition!r}): use Even(), Dynamic(), ByNorm()"
            )

    def reduce(self, load: Payload, group: Group) -> Flow:
        x, size = load.flat, group.size
        k = max(1, round(self.density * len(x)))
        dtype = wire_dtype(x.dtype, self.wire)
        if not pays(len(x), k, size, dtype.itemsize):
            return (yield from Dense(self.wire).reduce(load, group))
        turn = count(load.state)
        plan = self.partition.plan(load, k, size, turn)
        load.check_all(dtype)
        salience = load.salience
        union = yield from self._agree(load, salience, plan, turn, group)
        if salience is x:
            values = load.take(union, dtype)
        else:
            values = _take_due(load, salience, union, plan, dtype)
        mean = yield from average_at(union, values, load, self.wire, group)
        return load.mean_at(union, mean)

    def _agree(
        self, load: Payload, salience: Tensor, plan: Plan, turn: int, group: Group
    ) -> Steps:
        """The union of what the ranks select; reports are learned from."""
        known = load.state.get("thresholds")
        if known is None or len(known) != len(plan.quotas):
            known = torch.full((len(plan.quotas),), math.nan)
        thresholds = known.tolist()
        found, reports = [], []
        for s in plan.bins[(turn + group.rank) % group.size]:
            segment = salience[plan.edges[s] : plan.edges[s + 1]]
            norm = self.partition.measure(segment)
            where, threshold = pick(segment, plan.quotas[s], thresholds[s], turn)
            found.append(where)
            reports.append(Report(len(where), threshold, norm))
        bins = [plan.bins[(turn + rank) % group.size] for rank in range(group.size)]
        told = gather_indices(found, reports, plan, bins, load.flat.device, group)
        rows, everybody = yield from told
        load.state["thresholds"] = torch.tensor([r.threshold for r in everybody])
        self.partition.learn(load, plan, everybody)
        first = -turn % group.size  # the rank with bin 0: segments in their order
        return torch.cat([*rows[first:], *rows[:first]])


def _take_due(
    load: Payload, salience: Tensor, union: Tensor, plan: Plan, dtype: torch.dtype
) -> Tensor:
    """The entries at `union` that count as much here as where they were found, taken
    out; and zeros for the others, which stay."""
    ends = torch.tensor(plan.edges[1:], dtype=union.dtype)
    segment = torch.bucketize(union, ends.to(union.device), right=True)
    thresholds = load.state["thresholds"].to(salience)
    # Not where there is no threshold yet: NaN.
    small = salience.index_select(0, union).abs() < thresholds.index_select(0, segment)
    due = (~small).nonzero().squeeze(1)
    values = load.flat.new_zeros(len(union))
    return values.index_copy_(0, due, load.take(union.index_select(0, due), dtype))


def pays(n: int, k: int, size: int, itemsize: int = 4) -> bool:
    """Whether agreeing on k of n elements moves fewer bytes than sending all.

    Both are averaged by the same two rounds; what is saved, 2 (n - k) values, must be
    more than the indices (2 bytes each), a report and the alignment from every rank.
    One rank has nothing to save.
    """
    return size > 1 and 2 * itemsize * (n - k) > 2 * k + size * (HEAD + 8)


def pick(x: Tensor, quota: int, threshold: float, seed: int) -> tuple[Tensor, float]:
    """The `quota` largest of |x| (1-D), and a threshold to find them by the next time.

    Sorted indices (int32). `threshold` (NaN if unknown) says what to look at; it should
    leave a quarter more than `quota`, and 0 leaves all that is not zero. NaN counts as
    largest. `seed` is that of the sample for a threshold that does not fit.
    """
    spare = quota + quota // 4 + 1
    if quota == 0:
        return x.new_empty(0, dtype=index_dtype(len(x))), threshold
    if quota == len(x):
        return everything(x), threshold
    if len(x) <= max(SMALL, spare):
        return _exactly(x, quota, min(spare, len(x)))
    limit = 4 * spare
    found = above(x, threshold, limit) if threshold >= 0 else None
    if found is None or not _fits(len(found), quota, limit, threshold):
        threshold, _ = estimate(x, spare, SAMPLE, seed)
        found = above(x, threshold, limit)
        if not _fits(len(found), quota, limit, threshold):
            return _exactly(x, quota, spare)
    size = x.index_select(0, found).abs()  # faster than brackets
    following = _next(size, spare, threshold)
    if len(found) > quota:
        best = torch.topk(size, quota, sorted=False).indices
        # A mask keeps them in order: a sort takes longer than all the rest.
        kept = torch.zeros_like(found, dtype=torch.bool).index_fill_(0, best, True)
        found = found[kept]
    return found, following


def _fits(found: int, quota: int, limit: int, threshold: float) -> bool:
    return (found >= quota or threshold == 0) and found < limit


def _exactly(x: Tensor, quota: int, spare: int) -> tuple[Tensor, float]:
    values, largest = torch.topk(x.abs(), spare)
    where = largest[:quota].sort().values.to(index_dtype(len(x)))
    kept = where if values[quota - 1] != 0 else where[x[where] != 0]
    return kept, float(values[-1])


def _next(size: Tensor, spare: int, threshold: float) -> float:
    """The threshold, moved half the way to where `spare` entries would be above it.

    The tail's slope is Hill's: the mean of log(size / threshold).
    """
    if threshold == 0:
        return 0.0 if len(size) <= spare else math.nan
    slope = float(size.log().mean()) - math.log(threshold)
    if not math.isfinite(slope):
        return threshold
    move = 0.5 * slope * math.log(len(size) / spare)
    return threshold * math.exp(min(max(move, -1.0), 1.0))


def average_at(
    where: Tensor, values: Tensor, load: Payload, wire: Wire, group: Group
) -> Flow:
    """The mean of all ranks' `values` (1-D), which they took from `where`: by `Dense`.

    What `wire` takes off the mean is given back by the owner of the part.
    """
    length = -(-max(len(values), 1) // group.size) * group.size
    padded = torch.nn.functional.pad(values, (0, length - len(values)))
    dtype = wire_dtype(values.dtype, wire)
    share = length // group.size
    mine = where[group.rank * share : (group.rank + 1) * share]
    flow = Dense(wire).reduce(Payload(padded, [padded]), group)
    answer: Any = None
    while True:
        try:
            request = flow.send(answer)
        except StopIteration as stop:
            mean: Tensor = stop.value
            return mean[: len(where)]
        if isinstance(request, Cut) and dtype != values.dtype:
            rest = rounded_off(request.part, request.part.to(dtype))
            request.part.sub_(rest)
            load.give_back(mine, rest[: len(mine)] * group.size)
        answer = yield request
