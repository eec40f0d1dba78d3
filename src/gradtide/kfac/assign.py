"""Who inverts which factor, and who preconditions which layer: pure functions.

[Note: sequence] Factors come in the order in which a step produces them: A_0 ... A_L-1
in the forward, then G_L-1 ... G_0 in the backward. All costs are seconds. Equal
arguments give equal results, so ranks need to agree on the measured costs only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradtide.kfac.layers import Kind
from gradtide.kfac.partition import Send, arrivals, contiguous, finish, fusions

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
    messages: tuple[int, ...] = ()  # by factor, which it travels in; (): not decided

    def owner(self, layer: int, kind: Kind) -> int:
        return self.owners[position(layer, kind, len(self.workers))]

    def message(self, layer: int, kind: Kind) -> int:
        """The number of the message in which a factor travels, where it is decided."""
        return self.messages[position(layer, kind, len(self.workers))]


def sequence(num_layers: int) -> list[tuple[int, Kind]]:
    """(layer, kind) of each factor, [Note: sequence]."""
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
    reduce: Callable[[Sequence[int]], Send] | None = None,
    start: float = 0.0,
) -> Assignment:
    """PAD-KFAC: contiguous runs of factors, reduced to their owners, and their fusion.

    `ready` are the times at which factors are complete, `reduce(owners)` tells the
    seconds of a reduce to these owners. Of several ways to fuse the reduces, the one is
    taken with which, after the best partition (`contiguous`) for its arrivals, the last
    rank has inverted its run the earliest, if each message counts as `start` seconds
    more (`earliest`). Without `ready` and `reduce` inversions alone are balanced, and
    fusion is not decided.
    """
    workers = _everybody(len(costs) // 2, size)
    blocks = contiguous(costs, size)
    if ready is None or reduce is None:
        return Assignment(size, _owners(blocks), workers)
    found: list[tuple[float, tuple[int, ...], list[slice]]] = []
    send = reduce(_owners(blocks))  # of owners that are not yet the last word
    for cuts in fusions(numels, ready, send, start):
        blocks = contiguous(costs, size, arrivals(cuts, ready, send))
        owners = _owners(blocks)
        arriving = arrivals(cuts, ready, reduce(owners))
        end = max(finish(costs[block], arriving[block]) for block in blocks)
        found.append((end + start * len(cuts), owners, cuts))
    _, owners, cuts = min(found, key=lambda one: one[0])
    return Assignment(size, owners, workers, numbered(cuts))


def numbered(cuts: Sequence[slice]) -> tuple[int, ...]:
    """By factor, the number of the cut that it is in."""
    return tuple(i for i, cut in enumerate(cuts) for _ in range(cut.stop - cut.start))


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
            f"a fraction of {fraction} gradient workers: more than 0, at most 1"
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


def _owners(blocks: Sequence[slice]) -> tuple[int, ...]:
    """Of factors, where each rank has a block."""
    return tuple(r for r, b in enumerate(blocks) for _ in range(b.start, b.stop))


def _everybody(num_layers: int, size: int) -> tuple[range, ...]:
    return (range(size),) * num_layers
