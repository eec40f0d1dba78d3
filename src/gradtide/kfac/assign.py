"""Who inverts which factor, and who preconditions which layer: pure functions.

[Note: sequence] Factors come in the order in which a step produces them: A_0 ... A_L-1
in the forward, then G_L-1 ... G_0 in the backward (`layers.sequence`). All costs are
seconds. Equal arguments give equal results, so ranks need to agree on the measured
costs only. A `Send` tells the seconds that the factors from `begin` up to `end` take in
one message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from gradtide.collectives._balance import longest_first

Send: TypeAlias = Callable[[int, int], float]  # (begin, end)
EVERYWHERE = -1  # as an owner: every rank inverts the factor, and nobody sends it


@dataclass(frozen=True)
class Assignment:
    """An owner for each factor, and gradient workers for each layer.

    A layer's gradient workers hold its inverses and precondition its gradient; the
    other ranks are given the result. All ranks: inverses are gathered, no gradients
    (KAISA's COMM-OPT). One: the reverse (MEM-OPT, DP-KFAC).
    """

    owners: tuple[int, ...]  # of factors, [Note: sequence]
    workers: tuple[range, ...]  # of layers
    messages: tuple[int, ...] = ()  # by factor, which it travels in; (): not decided


def round_robin(num_layers: int, size: int) -> Assignment:
    """MPD-KFAC: factor i belongs to rank i mod size (Pauloski et al., 2020)."""
    return _all_work(tuple(i % size for i in range(2 * num_layers)), size)


def balanced(
    costs: Sequence[float],
    numels: Sequence[int],
    size: int,
    send: Callable[[int], float],
) -> Assignment:
    """SPD-KFAC's load balancing (Shi et al., 2021), by measured costs and jointly.

    The longest inversion goes to the least loaded rank. The cheapest are inverted
    everywhere, as many of them as minimise what all have done together at last: those,
    the longest load of the others, and `send(numel)`, the seconds to gather the others'
    inverses. (The paper compares each inversion with its own broadcast, whose start-ups
    fused messages share.)
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    found: list[tuple[float, dict[int, int]]] = []
    for count in range(len(order) + 1):
        shared, own = order[:count], order[count:]
        loads, ranks = longest_first([costs[i] for i in shared], [1.0] * size)
        seconds = sum(costs[i] for i in own) + max(loads)
        if shared:
            seconds += send(sum(numels[i] for i in shared))
        found.append((seconds, dict(zip(shared, ranks, strict=True))))
    _, best = min(found, key=lambda one: one[0])
    return _all_work(tuple(best.get(i, EVERYWHERE) for i in range(len(order))), size)


def divided(costs: Sequence[float], size: int) -> Assignment:
    """PAD-KFAC: contiguous runs of factors, balanced by their inversions alone."""
    return _all_work(numbered(contiguous(costs, size)), size)


def partitioned(
    costs: Sequence[float],
    numels: Sequence[int],
    size: int,
    ready: Sequence[float],
    reduce: Callable[[Sequence[int]], Send],
    start: float = 0.0,
) -> Assignment:
    """PAD-KFAC: contiguous runs of factors, reduced to their owners, and their fusion.

    `ready` are the times at which factors are complete, `reduce(owners)` tells the
    seconds of a reduce to these owners. Of several ways to fuse the reduces, the one is
    taken with which, after the best partition (`contiguous`) for its arrivals, the last
    rank has inverted its run the earliest, if each message counts as `start` seconds
    more (`earliest`).
    """
    found: list[tuple[float, Assignment]] = []
    # Of owners that are not yet the last word.
    send = reduce(divided(costs, size).owners)
    for cuts in fusions(numels, ready, send, start):
        blocks = contiguous(costs, size, arrivals(cuts, ready, send))
        owners = numbered(blocks)
        arriving = arrivals(cuts, ready, reduce(owners))
        end = max(finish(costs[block], arriving[block]) for block in blocks)
        placed = _all_work(owners, size, numbered(cuts))
        found.append((end + start * len(cuts), placed))
    return min(found, key=lambda one: one[0])[1]


def numbered(cuts: Sequence[slice]) -> tuple[int, ...]:
    """By factor, the number of the cut that it is in: a message, or an owner."""
    return tuple(i for i, cut in enumerate(cuts) for _ in range(cut.stop - cut.start))


def grid(costs: Sequence[float], size: int, fraction: float) -> Assignment:
    """KAISA: each layer has about `fraction` of the ranks as gradient workers.

    Ranks are divided into groups as even as can be, whatever their number is; layers go
    to the groups and a layer's factors to ranks of its group, the longest first. 1.0
    needs the least communication in a step, 1 / size the least memory (Pauloski et al.,
    2021) and one owner for all of a layer, as in DP-KFAC (Zhang et al., 2022).
    """
    num_layers = len(costs) // 2
    num_groups = -(-size // max(1, round(fraction * size)))
    bounds = [size * i // num_groups for i in range(num_groups + 1)]
    groups = [range(begin, end) for begin, end in pairwise(bounds)]
    layers = [costs[i] + costs[-1 - i] for i in range(num_layers)]
    _, chosen = longest_first(layers, [len(group) for group in groups])
    workers = [groups[group] for group in chosen]
    # Owners of factors among their layer's workers, the longest factor first.
    loads, owners = [0.0] * size, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        layer = i if i < num_layers else len(costs) - 1 - i
        owners[i] = min(workers[layer], key=lambda rank: (loads[rank], rank))
        loads[owners[i]] += costs[i]
    return Assignment(tuple(owners), tuple(workers))


def _all_work(
    owners: tuple[int, ...], size: int, messages: tuple[int, ...] = ()
) -> Assignment:
    """With all ranks as every layer's gradient workers."""
    return Assignment(owners, (range(size),) * (len(owners) // 2), messages)


# - Contiguous runs of factors, for ranks and for messages: exact ----------------------


def contiguous(
    costs: Sequence[float], size: int, ready: Sequence[float] | None = None
) -> list[slice]:
    """min(size, n) non-empty runs of n factors with the earliest latest `finish`.

    Exact, by dynamic programming over the ends of runs: O(size n^2).
    """
    n = len(costs)
    before = np.concatenate([[0.0], np.cumsum(costs)])
    wait = np.asarray(ready if ready is not None else np.zeros(n)) - before[:-1]
    # until[j, i]: when the run of factors j ... i - 1 is finished
    until = np.full((n + 1, n + 1), np.inf)
    for j in range(n):
        until[j, j + 1 :] = np.maximum.accumulate(wait[j:]) + before[j + 1 :]
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(min(size, n)):
        last = np.maximum(best[:, None], until)
        choices.append(last.argmin(0))
        best = last.min(0)
    return _runs(n, choices)


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
    return _runs(n, choices[:fewest])


def _runs(n: int, choices: Sequence[np.ndarray]) -> list[slice]:
    """Runs of n, by where each begins that ends somewhere: the first choices first."""
    ends = [n]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return [slice(begin, end) for begin, end in pairwise(reversed(ends))]
