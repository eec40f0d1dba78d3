"""The exact partition against exhaustive search."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from gradtide.kfac.assign import arrivals, contiguous, earliest, finish, fusions


def draws(n: int, seed: int) -> list[float]:
    """Costs like those of inversions: a few are much larger than the others."""
    dice = random.Random(100 * n + seed)
    return [dice.uniform(0.1, 2) ** 3 for _ in range(n)]


def all_cuts(n: int, most: int) -> list[list[slice]]:
    """Every way to cut n factors into at most `most` non-empty runs."""
    return [
        [slice(a, b) for a, b in pairwise([0, *inner, n])]
        for runs in range(1, min(most, n) + 1)
        for inner in combinations(range(1, n), runs - 1)
    ]


def latest(costs: list[float], cuts: list[slice], ready: list[float]) -> float:
    return max(finish(costs[cut], ready[cut]) for cut in cuts)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "size"), [(1, 1), (2, 4), (4, 4), (8, 3), (9, 4)])
@pytest.mark.parametrize("waiting", [False, True])
def test_contiguous_equals_brute_force(
    n: int, size: int, seed: int, waiting: bool
) -> None:
    costs = draws(n, seed)
    dice = random.Random(seed)
    late = sorted(dice.uniform(0, sum(costs)) for _ in costs)
    ready = late if waiting else [0.0] * n
    found = contiguous(costs, size, ready)
    best = min(latest(costs, cuts, ready) for cuts in all_cuts(n, size))
    assert latest(costs, found, ready) == pytest.approx(best, rel=1e-12)
    assert len(found) == min(n, size)
    assert [i for cut in found for i in range(n)[cut]] == list(range(n))


def test_one_huge_factor_has_a_rank_of_its_own() -> None:
    assert contiguous([1, 1, 1, 100, 1, 1], 3) == [
        slice(0, 3),
        slice(3, 4),
        slice(4, 6),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_first_fusion_has_the_earliest_last_arrival(seed: int) -> None:
    dice = random.Random(seed)
    numels = [dice.randint(1, 50) for _ in range(7)]
    ready = sorted(dice.uniform(0, 20) for _ in numels)

    def send(begin: int, end: int) -> float:
        return 2.0 + 0.1 * sum(numels[begin:end])

    apart = [cuts for cuts in all_cuts(7, 7) if 3 in {cut.start for cut in cuts}]
    ends = [arrivals(cuts, ready, send)[-1] for cuts in apart]
    first, *others = fusions(numels, ready, send)
    assert arrivals(first, ready, send)[-1] == pytest.approx(min(ends))
    assert [slice(0, 3), slice(3, 7)] in others
    for cuts in (first, *others):
        assert cuts in apart


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("start", [0.5, 3.0, 100.0])
def test_messages_are_worth_their_start(seed: int, start: float) -> None:
    """The best sum of the last arrival and of what messages cost, by brute force."""
    dice = random.Random(seed)
    numels = [dice.randint(1, 50) for _ in range(8)]
    ready = sorted(dice.uniform(0, 20) for _ in numels)

    def send(begin: int, end: int) -> float:
        return 0.1 * sum(numels[begin:end])

    def cost(cuts: list[slice]) -> float:
        return arrivals(cuts, ready, send)[-1] + start * len(cuts)

    apart = [cuts for cuts in all_cuts(8, 8) if 4 in {cut.start for cut in cuts}]
    found = earliest(ready, send, start)
    assert cost(found) == pytest.approx(min(map(cost, apart)))
    if start == 100.0:
        assert found == [slice(0, 4), slice(4, 8)]
