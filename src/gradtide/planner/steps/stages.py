"""Where a step with K-FAC goes, in the stages of the papers.

Shi et al. (ICDCS 2021) split a step into forward and backward, communication of
gradients, computation and communication of factors, and of inverses. A stage's share of
a step is what the training thread computes, or waits for: what is on the wire or being
inverted meanwhile. Shares add up to the step; a stage may be busy for longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradtide.core.telemetry import Record
from gradtide.kfac.stages import stage_of
from gradtide.planner.clock.intervals import Interval, union, without


@dataclass(frozen=True)
class Stages:
    """Seconds of a step in each stage: its share of the step, or how long it is busy.

    `update` is what the papers leave out: preconditioning, and the optimizer.
    """

    ffbp: float
    gradient_comm: float
    factor_comp: float
    factor_comm: float
    inverse_comp: float
    inverse_comm: float
    update: float


WIRED = ("gradient_comm", "factor_comm", "inverse_comm")


def shares(
    times: Iterable[Interval], records: Sequence[Record], inverting: Iterable[Interval]
) -> dict[str, float]:
    """Seconds of `times` in which the wire is busy, by stage, and of the others those
    with inversions. Where neither is, flows work for what they are about to send:
    communication of gradients.
    """
    found, left = {}, union(times)
    for stage in WIRED:
        busy = [(r.start, r.end) for r in records if stage_of(r.bucket) == stage]
        found[stage], left = _taken(left, busy)
    found["inverse_comp"], left = _taken(left, inverting)
    found["gradient_comm"] += _length(left)
    return found


def exposed(
    waited: Sequence[Interval],
    computed: Sequence[Interval],
    slowed: float,
    records: Sequence[Record],
    inverting: Sequence[Interval],
) -> dict[str, float]:
    """By stage: seconds waited for it, and its part of those that it slowed others by.

    `slowed` seconds are dealt out in proportion to how long each stage was at work
    while the training thread `computed`.
    """
    found = shares(waited, records, inverting)
    busy = union([*((r.start, r.end) for r in records), *inverting])
    idle = without(union(computed), busy)
    beside = shares(without(union(computed), idle), records, inverting)
    total = sum(beside.values())
    if not total:
        return {**found, "gradient_comm": found["gradient_comm"] + slowed}
    return {s: found[s] + slowed * beside[s] / total for s in found}


def _taken(
    times: list[Interval], busy: Iterable[Interval]
) -> tuple[float, list[Interval]]:
    """(seconds of `times` that are busy, what is left of them)."""
    left = without(times, union(busy))
    return _length(times) - _length(left), left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
