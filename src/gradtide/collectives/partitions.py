"""Who looks for large entries where, and for how many, in `PartitionedTopK`.

A partition cuts a bucket into segments, says how many entries each is to give, and
deals them out into as many bins as there are ranks. It learns for the next step from
what all ranks were told, so every rank makes the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradtide.core.payload import Payload

BLOCKS = 1024  # in a bucket: the boundaries of `Dynamic` lie between them


class Plan(NamedTuple):
    """Segment s is flat[edges[s] : edges[s + 1]] and is to give quotas[s] entries."""

    edges: Sequence[int]
    quotas: Sequence[int]
    bins: Sequence[Sequence[int]]  # the segments of each, ascending


class Report(NamedTuple):
    """What all ranks are told of a segment by the one that looked through it."""

    found: int
    threshold: float  # for the next step; NaN if there is none yet
    norm: float


class Partition(Protocol):
    """A frozen dataclass; its memory is in `payload.state`, equal on all ranks."""

    def plan(self, payload: Payload, k: int, size: int, turn: int) -> Plan: ...

    def measure(self, segment: Tensor) -> Tensor:
        """What is to be told of a segment, as its norm: a number on its device."""
        return segment.new_zeros(())

    def learn(self, payload: Payload, plan: Plan, reports: Sequence[Report]) -> None:
        """Remember what the next plan goes by."""
        return


@dataclass(frozen=True)
class Even(Partition):
    """Cut a bucket into P equal contiguous parts, each of which gives k/P entries.

    This is MiCRO's partition (Yoon and Oh, HiPC 2023, arXiv:2310.00967). A part gives
    as many entries however large they are compared with those of others. It remembers
    nothing.
    """

    def plan(self, payload: Payload, k: int, size: int, turn: int) -> Plan:
        edges = [len(payload.flat) * i // size for i in range(size + 1)]
        return _one_each(edges, k, turn)


@dataclass(frozen=True)
class Dynamic(Partition):
    """Cut a bucket into P parts, and move their boundaries until thresholds are equal.

    This is ExDyna's partition (Yoon and Oh, CCGrid 2024, arXiv:2402.13781). Parts are
    contiguous. Each gives k/P entries, and where thresholds are equal these are the
    largest of the whole bucket. All boundaries move at once, to multiples of n/1024
    elements; the published rule moves one block at a time. No part gets shorter than
    n/(4 P).

    Args:
        gain: How far boundaries move, above 0 and at most 1: the power of a part's
            threshold that stands for how many large entries it holds. Larger values
            follow faster, and may swing. The default, 0.5, goes about half the way.

    Raises:
        ValueError: `gain` is outside its range.
    """

    gain: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.gain <= 1:
            raise ValueError(f"Dynamic(gain={self.gain}): 0 < gain <= 1")

    def plan(self, payload: Payload, k: int, size: int, turn: int) -> Plan:
        edges = payload.state.get("edges")
        if edges is None or len(edges) != size + 1:
            return Even().plan(payload, k, size, turn)
        return _one_each(edges.tolist(), k, turn)

    def learn(self, payload: Payload, plan: Plan, reports: Sequence[Report]) -> None:
        moved = rebalance(plan.edges, [r.threshold for r in reports], self.gain)
        payload.state["edges"] = torch.tensor(moved, dtype=torch.int64, device="cpu")


def _one_each(edges: Sequence[int], k: int, turn: int) -> Plan:
    """One segment a bin. Fewer entries than segments: these give them in turn."""
    size = len(edges) - 1
    places = [(i + turn) % size for i in range(size)]
    even = [k * (j + 1) // size - k * j // size for j in places]
    lengths = [end - begin for begin, end in pairwise(edges)]
    quotas = [min(q, n) for q, n in zip(even, lengths, strict=True)]
    return Plan(edges, quotas, [[i] for i in range(size)])


def rebalance(
    edges: Sequence[int], thresholds: Sequence[float], gain: float
) -> list[int]:
    """Boundaries moved so that parts with high thresholds get shorter.

    A part of threshold t is taken to hold t ** gain of the entries, evenly spread, and
    at least a quarter of what the fullest holds. New parts hold equal shares.
    """
    n, size = edges[-1], len(edges) - 1
    top = max(thresholds, default=0.0)
    if not all(map(isfinite, thresholds)) or not top > 0:
        return list(edges)
    weights = [max(t / top, 1e-3) ** gain for t in thresholds]
    weights = [max(w, 0.25 * max(weights)) for w in weights]
    sums = [0.0, *accumulate(weights)]
    block, least = max(n // BLOCKS, 1), max(n // (4 * size), 1)
    moved, part = [0], 0
    for i in range(1, size):
        target = sums[-1] * i / size
        while sums[part + 1] < target:
            part += 1
        inside = (target - sums[part]) / weights[part]
        edge = edges[part] + inside * (edges[part + 1] - edges[part])
        edge = round(edge / block) * block
        moved.append(min(max(edge, moved[-1] + least), n - (size - i) * least))
    return [*moved, n]
