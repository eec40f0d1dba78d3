"""Contiguous runs of factors for ranks, and of factors that travel together: exact.

Pure functions of times in seconds, lists with one entry per factor in the order in
which a step produces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np


def contiguous(
    costs: Sequence[float], size: int, ready: Sequence[float] | None = None
) -> list[slice]:
    """min(size, n) non-empty runs of n factors with the earliest latest `finish`.

    Exact, by dynamic programming over the ends of runs: O(size n^2).
    """
    n, num = len(costs), min(size, len(costs))
    before = np.concatenate([[0.0], np.cumsum(costs)])
    wait = np.asarray(ready if ready is not None else np.zeros(n)) - before[:-1]
    # until[j, i]: when the run of factors j ... i - 1 is finished
    until = np.full((n + 1, n + 1), np.inf)
    for j in range(n):
        until[j, j + 1 :] = np.maximum.accumulate(wait[j:]) + before[j + 1 :]
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(num):
        last = np.maximum(best[:, None], until)
        choices.append(last.argmin(0))
        best = last.min(0)
    ends = [n]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return [slice(begin, end) for begin, end in pairwise(reversed(ends))]


def finish(costs: Sequence[float], ready: Sequence[float]) -> float:
    """When a rank that takes factors in turn has inverted them all."""
    clock = 0.0
    for cost, start in zip(costs, ready, strict=True):
        clock = max(clock, start) + cost
    return clock


def arrivals(
    cuts: Sequence[slice],
    numels: Sequence[int],
    ready: Sequence[float],
    send: Callable[[int], float],
) -> list[float]:
    """When each factor has been reduced, if the cuts travel one after the other."""
    clock, times = 0.0, []
    for cut in cuts:
        clock = max(clock, *ready[cut]) + send(sum(numels[cut]))
        times += [clock] * len(ready[cut])
    return times


def fusions(
    numels: Sequence[int], ready: Sequence[float], send: Callable[[int], float]
) -> list[list[slice]]:
    """Ways to cut the sequence: the earliest last arrival, and sizes in powers of 2.

    No run spans the middle: factors of forward and of backward travel apart.
    """
    found = [earliest(numels, ready, send)]
    limit, middle = max(numels), len(numels) // 2
    while limit < 2 * sum(numels):
        cuts, begin, filled = [], 0, 0
        for i, numel in enumerate(numels):
            if i and (i == middle or filled + numel > limit):
                cuts.append(slice(begin, i))
                begin, filled = i, 0
            filled += numel
        found.append([*cuts, slice(begin, len(numels))])
        limit *= 2
    return found


def earliest(
    numels: Sequence[int], ready: Sequence[float], send: Callable[[int], float]
) -> list[slice]:
    """The cuts with which the last factor arrives the earliest, exactly.

    No run spans the middle of the sequence.
    """
    before, middle = [0, *accumulate(numels)], len(numels) // 2
    ends: list[tuple[float, int]] = [(0.0, 0)]  # (arrival, first of the last run)
    start = 0.0
    for i in range(1, len(numels) + 1):
        start = max(start, ready[i - 1])
        ends.append(
            min(
                (max(ends[j][0], start) + send(before[i] - before[j]), j)
                for j in range(middle if i > middle else 0, i)
            )
        )
    cuts, end = [], len(numels)
    while end:
        cuts.append(slice(ends[end][1], end))
        end = ends[end][1]
    return cuts[::-1]
