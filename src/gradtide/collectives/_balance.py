"""Who sends how much: arithmetic that every rank does alike, on numbers all have.

Knows no tensors. Only +, -, *, / and comparisons: nothing that two machines' libraries
could round differently.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

POINTS = 24  # of a curve: more => the winners are closer to the exact top k
START = 1 << 15  # bytes that a slow wire carries while one more exchange starts


def pays(numel: int, k: int, size: int) -> bool:
    """Whether k of `numel` entries cost less than all of them, for `size` ranks.

    In words that a rank sends: (P - 1) / P of 1.5 k to the owners and again to all
    ranks, and two small messages to every peer; against 2 n (P - 1) / P of the dense
    exchange. Fewer entries than ranks are not worth the additional rounds either.
    """
    share = (size - 1) / size
    small = (size - 1) * (2 + 2 * (2 + POINTS))
    return k >= size and 3 * k * share + small < 2 * numel * share


def curve_ranks(count: int) -> list[int]:
    """The ranks (1: the largest) at which `count` ranked magnitudes are sampled.

    The first, and from the last one upwards always two thirds as many: as exact where
    winners are few as where they are many.
    """
    down = [max(1, count * 2**i // 3**i) for i in range(POINTS - 1)]
    return [1, *reversed(down)]


@dataclass(frozen=True)
class Curve:
    """How many entries an owner has at or above a level (log2 of magnitude)."""

    depths: Sequence[float]  # negative levels, ascending
    ranks: Sequence[int]

    def above(self, depth: float) -> float:
        """Entries down to `depth`; between samples a straight line."""
        i = bisect_right(self.depths, depth)
        if i == 0:
            return 0.0
        if i == len(self.depths):
            return float(self.ranks[-1])
        (a, b), (low, high) = self.depths[i - 1 : i + 1], self.ranks[i - 1 : i + 1]
        return low + (high - low) * (depth - a) / (b - a)


def shares(curves: Sequence[Curve], k: int) -> tuple[list[int], float]:
    """How many entries each owner sends, and the level above which they lie.

    The shares sum to `k`, or to all entries if those are fewer: the k largest of the
    union, as exactly as the curves tell.
    """
    totals = [curve.ranks[-1] if curve.ranks else 0 for curve in curves]
    if sum(totals) <= k:
        return totals, float("-inf")
    depths = sorted(depth for curve in curves for depth in curve.depths)
    low, high = 0, len(depths) - 1  # find the first depth with k entries
    while low < high:
        middle = (low + high) // 2
        if sum(curve.above(depths[middle]) for curve in curves) >= k:
            high = middle
        else:
            low = middle + 1
    upper = [curve.above(depths[low]) for curve in curves]
    lower = [curve.above(depths[low - 1]) if low else 0.0 for curve in curves]
    part = (k - sum(lower)) / (sum(upper) - sum(lower))
    exact = [a + part * (b - a) for a, b in zip(lower, upper, strict=True)]
    return _rounded(exact, totals, k), -depths[low]


def _rounded(exact: Sequence[float], most: Sequence[int], total: int) -> list[int]:
    """Whole numbers within 1 of `exact`, none above its `most`, that sum to `total`."""
    ends = [int(end + 0.5) for end in accumulate(exact)]
    begins = [0, *ends[:-1]]
    whole = [min(e - b, m) for b, e, m in zip(begins, ends, most, strict=True)]
    for owner, limit in enumerate(most):  # what rounding errors of the sums left over
        whole[owner] += max(
            -whole[owner], min(total - sum(whole), limit - whole[owner])
        )
    return whole


def could_pay(lengths: Sequence[int]) -> bool:
    """Whether evening out messages of these lengths (bytes) is worth a closer look.

    Needs P numbers where `recut` makes P x P: with hundreds of ranks that takes longer
    than the exchange. Never False where `worth_moving` is True.
    """
    size = len(lengths)
    return (size - 1) * (max(lengths) * size - sum(lengths)) > START * size


def recut(lengths: Sequence[int], align: int) -> list[list[int]]:
    """Moves that cut the ranks' messages, one after the other, into even lengths.

    Row r, column j: how much rank r sends to rank j; column sums are the new lengths,
    multiples of `align` if `lengths` are.
    """
    size, total = len(lengths), sum(lengths)
    cuts = [total * j // size // align * align for j in range(size)] + [total]
    return [
        [max(0, min(end, high) - max(begin, low)) for low, high in pairwise(cuts)]
        for begin, end in pairwise(accumulate(lengths, initial=0))
    ]


def worth_moving(moves: Sequence[Sequence[int]]) -> bool:
    """Whether to even out messages before they go round a ring.

    Each of the ring's P - 1 steps takes as long as its largest message (bytes). Against
    that stands what the busiest rank has to send or receive, and one more start.
    """
    size = len(moves)
    columns = list(zip(*moves, strict=True))
    largest = max(map(sum, moves))
    saved = (size - 1) * (largest - max(map(sum, columns)))
    sent = [sum(row) - row[r] for r, row in enumerate(moves)]
    received = [sum(column) - column[r] for r, column in enumerate(columns)]
    return bool(saved > max(*sent, *received) + START)


def longest_first(
    costs: Sequence[float], speeds: Sequence[float]
) -> tuple[list[float], list[int]]:
    """(loads, bins): each cost, the longest first, to the least loaded bin (Graham,
    1969); of equals the first."""
    heap = [(0.0, i) for i in range(len(speeds))]
    bins = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, i = heap[0]
        heapq.heapreplace(heap, (load + costs[item] / speeds[i], i))
        bins[item] = i
    return [load for load, _ in heap], bins
