"""Contiguous runs of factors for ranks, and of factors that travel together: exact.

Pure functions of times in seconds, lists with one entry per factor in the order in
which a step produces them. A `Send` tells the seconds that the factors from `begin` up
to `end` take in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

Send: TypeAlias = Callable[[int, int], float]  # (begin, end)


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


def arrivals(cuts: Sequence[slice], ready: Sequence[float], send: Send) -> list[float]:
    """When each factor has been reduced, if the cuts travel one after the other."""
    clock, times = 0.0, []
    for cut in cuts:
        clock = max(clock, *ready[cut]) + send(cut.start, cut.stop)
        times += [clock] * len(ready[cut])
    return times


def fusions(
    numels: Sequence[int], ready: Sequence[float], send: Send, start: float = 0.0
) -> list[list[slice]]:
    """Ways to cut the sequence: the earliest last arrival, and sizes in powers of 2.

    No run spans the middle: factors of forward and of backward travel apart.
    """
    found = [earliest(ready, send, start)]
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


def earliest(ready: Sequence[float], send: Send, start: float = 0.0) -> list[slice]:
    """The cuts with which the last factor arrives the earliest, exactly.

    Each message counts as `start` seconds more: what it takes to start one is work for
    processors, which have other work, also where the message itself hides. No run spans
    the middle of the sequence.
    """
    n, middle = len(ready), len(ready) // 2
    seconds = np.full((n + 1, n + 1), np.inf)  # of a message [begin, end]
    for end in range(1, n + 1):
        for begin in range(middle if end > middle else 0, end):
            seconds[begin, end] = send(begin, end)
    complete = np.maximum.accumulate([0.0, *ready])
    arrival = np.full(n + 1, np.inf)  # of the first factors, in so many messages
    arrival[0] = 0.0
    least, fewest = np.inf, 0
    choices: list[np.ndarray] = []
    while len(choices) < n and start * len(choices) < least:
        last = np.maximum(arrival[:, None], complete) + seconds
        choices.append(last.argmin(0))
        arrival = last.min(0)
        if arrival[n] + start * len(choices) < least:
            least, fewest = arrival[n] + start * len(choices), len(choices)
    ends = [n]
    for choice in reversed(choices[:fewest]):
        ends.append(int(choice[ends[-1]]))
    return [slice(begin, end) for begin, end in pairwise(reversed(ends))]
