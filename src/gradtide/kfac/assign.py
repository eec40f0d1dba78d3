"""Who inverts which factor, and who preconditions which layer: pure functions.

Factors come in the order in which a step produces them ([Note: sequence]): A_0 ... A_L-1
in the forward, then G_L-1 ... G_0 in the backward. All costs are seconds. Equal
arguments give equal results, so ranks need to agree on the measured costs only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from gradtide.kfac.layers import Kind

EVERYWHERE = -1  # as an owner: every rank inverts the factor, and nobody sends it


@dataclass(frozen=True)
class Assignment:
    """An owner for each factor, and gradient workers for each layer.

    A layer's gradient workers hold its inverses and precondition its gradient; the
    other ranks are given the result. All ranks: inverses are gathered, no gradients
    (KAISA's COMM-OPT). One: the reverse (MEM-OPT, DP-KFAC).
    """

    size: int  # ranks
    owners: tuple[int, ...]  # of factors, [Note: sequence]
    workers: tuple[range, ...]  # of layers
    cuts: tuple[slice, ...] = ()  # factors that travel together, where that is decided

    def owner(self, layer: int, kind: Kind) -> int:
        return self.owners[position(layer, kind, len(self.workers))]

    def inverted_by(self, rank: int) -> list[int]:
        """Positions in the sequence of the factors that `rank` inverts."""
        return [i for i, r in enumerate(self.owners) if r in (rank, EVERYWHERE)]

    def sizes(self, cut: slice, numels: Sequence[int]) -> list[int]:
        """Elements of a run of factors that belong to each rank.

        Parts for a ReduceScatter: owners have to ascend in the run, as `partitioned`
        has them do.
        """
        sizes = [0] * self.size
        for owner, numel in zip(self.owners[cut], numels[cut], strict=True):
            sizes[owner] += numel
        return sizes


def sequence(num_layers: int) -> list[tuple[int, Kind]]:
    """[Note: sequence] (layer, kind) of each factor, as the step produces them."""
    forward: list[tuple[int, Kind]] = [(i, "A") for i in range(num_layers)]
    return [*forward, *((i, "G") for i in reversed(range(num_layers)))]


def position(layer: int, kind: Kind, num_layers: int) -> int:
    """A factor's place in the `sequence`."""
    return layer if kind == "A" else 2 * num_layers - 1 - layer


def round_robin(num_layers: int, size: int) -> Assignment:
    """MPD-KFAC: factor i belongs to rank i mod size (Pauloski et al., 2020)."""
    owners = tuple(i % size for i in range(2 * num_layers))
    return Assignment(size, owners, _everybody(num_layers, size))


def balanced(
    costs: Sequence[float],
    numels: Sequence[int],
    size: int,
    send: Callable[[int], float],
) -> Assignment:
    """SPD-KFAC's load balancing (Shi et al., 2021), by measured costs and jointly.

    The longest inversion goes to the least loaded rank. The m cheapest are inverted
    everywhere, with the m that minimises what all have done together at last: those m,
    the longest load of the others, and `send(numel)`, the seconds to gather the others'
    inverses. (The paper compares each inversion with its own broadcast, whose start-ups
    fused messages share.)
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    best: tuple[float, int] | None = None
    for m in range(len(order), -1, -1):
        shared, own = order[: len(order) - m], order[len(order) - m :]
        loads, _ = _longest_first([costs[i] for i in shared], [1.0] * size)
        seconds = sum(costs[i] for i in own) + max(loads)
        if shared:
            seconds += send(sum(numels[i] for i in shared))
        if best is None or seconds < best[0]:
            best = (seconds, m)
    assert best is not None
    shared = order[: len(order) - best[1]]
    _, ranks = _longest_first([costs[i] for i in shared], [1.0] * size)
    owners = [EVERYWHERE] * len(order)
    for i, rank in zip(shared, ranks, strict=True):
        owners[i] = rank
    return Assignment(size, tuple(owners), _everybody(len(costs) // 2, size))


def partitioned(
    costs: Sequence[float],
    numels: Sequence[int],
    size: int,
    ready: Sequence[float] | None = None,
    send: Callable[[int], float] | None = None,
) -> Assignment:
    """PAD-KFAC: contiguous runs of factors, reduced to their owner alone; and its fusion.

    `ready` are the times at which factors are complete, `send(numel)` the seconds of one
    reduce. Of several ways to fuse the reduces, the one is taken with which, after the
    best partition (`contiguous`) for its arrivals, the last rank has inverted its run
    the earliest. Without `ready` and `send` inversions alone are balanced.
    """
    ready = ready or [0.0] * len(costs)
    best: tuple[float, list[slice], list[slice]] | None = None
    for cuts in _fusions(numels, ready, send):
        arriving = arrivals(cuts, numels, ready, send) if send else ready
        blocks = contiguous(costs, size, arriving)
        end = max(finish(costs[block], arriving[block]) for block in blocks)
        if best is None or end < best[0]:
            best = (end, cuts, blocks)
    assert best is not None
    _, cuts, blocks = best
    owners = [r for r, block in enumerate(blocks) for _ in costs[block]]
    workers = _everybody(len(costs) // 2, size)
    return Assignment(size, tuple(owners), workers, tuple(cuts))


def whole_layers(costs: Sequence[float], size: int) -> Assignment:
    """DP-KFAC: one owner for all of a layer (Zhang et al., 2022), by measured costs."""
    return grid(costs, size, 1 / size)


def grid(costs: Sequence[float], size: int, fraction: float) -> Assignment:
    """KAISA: each layer has about `fraction` of the ranks as gradient workers.

    Ranks are divided into groups as even as can be, whatever their number is; layers go
    to the groups and a layer's factors to ranks of its group, the longest first. 1.0
    needs the least communication in a step, 1 / size the least memory (Pauloski et al.,
    2021). Raises ValueError for a fraction outside of (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(
            f"a fraction of {fraction} gradient workers: it is more than 0 and at most 1"
        )
    num_layers = len(costs) // 2
    num_groups = -(-size // max(1, round(fraction * size)))
    bounds = [size * i // num_groups for i in range(num_groups + 1)]
    groups = [range(begin, end) for begin, end in pairwise(bounds)]
    layers = [costs[i] + costs[-1 - i] for i in range(num_layers)]
    order = sorted(range(num_layers), key=lambda i: (-layers[i], i))
    _, chosen = _longest_first([layers[i] for i in order], [len(g) for g in groups])
    workers = [range(0)] * num_layers
    for i, group in zip(order, chosen, strict=True):
        workers[i] = groups[group]
    owners = _within(costs, workers, size)
    return Assignment(size, tuple(owners), tuple(workers))


# - Parts ------------------------------------------------------------------------------


def contiguous(
    costs: Sequence[float], size: int, ready: Sequence[float] | None = None
) -> list[slice]:
    """min(size, n) non-empty runs of n factors, the longest `finish` as short as can be.

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
    """When each factor has been reduced, if runs of factors travel one after the other."""
    clock, times = 0.0, []
    for cut in cuts:
        clock = max(clock, *ready[cut]) + send(sum(numels[cut]))
        times += [clock] * len(ready[cut])
    return times


def _fusions(
    numels: Sequence[int],
    ready: Sequence[float],
    send: Callable[[int], float] | None,
) -> list[list[slice]]:
    """Ways to cut the sequence: the earliest last arrival, and sizes in powers of 2."""
    if send is None:
        return [[slice(0, len(numels))]]
    found = [_earliest(numels, ready, send)]
    limit = max(numels)
    while limit < 2 * sum(numels):
        cuts, begin, filled = [], 0, 0
        for i, numel in enumerate(numels):
            if filled and filled + numel > limit:
                cuts.append(slice(begin, i))
                begin, filled = i, 0
            filled += numel
        found.append([*cuts, slice(begin, len(numels))])
        limit *= 2
    return found


def _earliest(
    numels: Sequence[int], ready: Sequence[float], send: Callable[[int], float]
) -> list[slice]:
    """The cuts with which the last factor arrives the earliest, exactly."""
    before = [0, *accumulate(numels)]
    ends: list[tuple[float, int]] = [(0.0, 0)]  # (arrival, first of the last run)
    for i in range(1, len(numels) + 1):
        start = max(ready[:i])
        ends.append(
            min(
                (max(ends[j][0], start) + send(before[i] - before[j]), j)
                for j in range(i)
            )
        )
    cuts, end = [], len(numels)
    while end:
        cuts.append(slice(ends[end][1], end))
        end = ends[end][1]
    return cuts[::-1]


def _longest_first(
    costs: Sequence[float], speeds: Sequence[float]
) -> tuple[list[float], list[int]]:
    """(loads, bins): costs, sorted from the longest, each to the least loaded bin."""
    heap = [(0.0, i) for i in range(len(speeds))]
    bins = []
    for cost in costs:
        load, i = heap[0]
        heapq.heapreplace(heap, (load + cost / speeds[i], i))
        bins.append(i)
    return [load for load, _ in heap], bins


def _within(
    costs: Sequence[float], workers: Sequence[range], size: int
) -> Sequence[int]:
    """Owners of factors among their layer's workers, the longest factor first."""
    num_layers = len(workers)
    loads, owners = [0.0] * size, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        layer = i if i < num_layers else len(costs) - 1 - i
        owner = min(workers[layer], key=lambda rank: (loads[rank], rank))
        loads[owner] += costs[i]
        owners[i] = owner
    return owners


def _everybody(num_layers: int, size: int) -> tuple[range, ...]:
    return (range(size),) * num_layers
