"""Placement of factors, against exhaustive search where that is possible."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, product

import pytest

from gradtide.kfac.assign import (
    EVERYWHERE,
    Assignment,
    arrivals,
    balanced,
    divided,
    finish,
    grid,
    partitioned,
    round_robin,
)
from gradtide.kfac.layers import Kind, sequence


def all_cuts(n: int, most: int) -> list[list[slice]]:
    """Every way to cut n factors into at most `most` non-empty runs."""
    return [
        [slice(a, b) for a, b in pairwise([0, *inner, n])]
        for runs in range(1, min(most, n) + 1)
        for inner in combinations(range(1, n), runs - 1)
    ]


def runs(numbers: tuple[int, ...]) -> list[slice]:
    """Where equal numbers stand, in the order of the numbers."""
    starts = [numbers.index(i) for i in sorted(set(numbers))]
    return [slice(a, b) for a, b in pairwise([*starts, len(numbers)])]


def by_factor(found: Assignment) -> dict[tuple[int, Kind], int]:
    """Owners by layer and kind."""
    return dict(zip(sequence(range(len(found.workers))), found.owners, strict=True))


def latest(costs: list[float], cuts: list[slice], ready: list[float]) -> float:
    return max(finish(costs[cut], ready[cut]) for cut in cuts)


def test_the_sequence_is_forward_then_backward() -> None:
    assert sequence(range(2)) == [(0, "A"), (1, "A"), (1, "G"), (0, "G")]


@pytest.mark.parametrize("seed", range(4))
def test_pad_is_near_the_best_of_all_fusions_and_partitions(seed: int) -> None:
    """The twin of the joint choice: every fusion with every partition, 6 factors."""
    n, size, dice = 6, 3, random.Random(seed)
    numels = [dice.randint(1, 40) for _ in range(n)]
    costs = [numel**1.5 / 40 for numel in numels]
    ready = sorted(dice.uniform(0, 20) for _ in range(n))

    def send(begin: int, end: int) -> float:
        return 3.0 + 0.1 * sum(numels[begin:end])

    best = min(
        latest(costs, blocks, arrivals(cuts, ready, send))
        for cuts, blocks in product(all_cuts(n, n), all_cuts(n, size))
        if n // 2 in {cut.start for cut in cuts}
    )
    found = partitioned(costs, numels, size, ready, lambda owners: send)
    arriving = arrivals(runs(found.messages), ready, send)
    blocks = runs(found.owners)
    assert len(blocks) == size
    assert best <= latest(costs, blocks, arriving) <= 1.1 * best


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_pad_owners_and_messages_ascend(size: int) -> None:
    numels = [5 * i + 1 for i in range(14)]
    costs = [float(numel) for numel in numels]
    ready = [float(i) for i in range(14)]
    found = partitioned(
        costs, numels, size, ready, lambda owners: lambda a, b: float(sum(numels[a:b]))
    )
    assert list(found.owners) == sorted(found.owners)
    assert set(found.owners) == set(range(min(size, 14)))
    assert list(found.messages) == sorted(found.messages)
    assert found.messages[6] < found.messages[7]  # forward and backward apart


def test_without_times_fusion_is_not_decided() -> None:
    found = divided([1.0, 1.0, 1.0, 3.0], 2)
    assert found.owners == (0, 0, 0, 1)
    assert found.messages == ()


def test_round_robin() -> None:
    assert round_robin(3, 4).owners == (0, 1, 2, 3, 0, 1)
    assert by_factor(round_robin(3, 4))[0, "G"] == 1


def test_costly_messages_are_saved_by_inverting_everywhere() -> None:
    costs, numels = [1.0, 2.0, 8.0, 8.0], [1, 2, 8, 8]
    assert set(balanced(costs, numels, 2, lambda n: 100.0).owners) == {EVERYWHERE}
    free = balanced(costs, numels, 2, lambda n: 0.0)
    assert sorted(free.owners) == [0, 0, 1, 1]
    some = balanced([0.1, 0.1, 8.0, 8.0], [9, 9, 9, 9], 2, lambda n: 0.1 * n)
    assert some.owners == (EVERYWHERE, EVERYWHERE, 0, 1)


def test_balanced_weighs_by_seconds() -> None:
    costs = [4.0, 3.0, 3.0, 2.0, 2.0, 2.0]
    owners = balanced(costs, [1] * 6, 2, lambda n: 0.0).owners
    loads = [
        sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in (0, 1)
    ]
    assert loads == [8.0, 8.0]


def test_whole_layers_have_one_owner_each() -> None:
    costs = [5.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    found = grid(costs, 3, 1 / 3)
    owner = by_factor(found)
    for layer, workers in enumerate(found.workers):
        assert owner[layer, "A"] == owner[layer, "G"] == workers[0]
        assert len(workers) == 1
    assert owner[0, "A"] != owner[3, "A"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.8, 1.0])
def test_any_fraction_of_any_number_of_ranks(size: int, fraction: float) -> None:
    found = grid([float(i + 1) for i in range(20)], size, fraction)
    wanted, owner = max(1, round(fraction * size)), by_factor(found)
    for layer, workers in enumerate(found.workers):
        assert wanted / 2 <= len(workers) <= wanted
        assert owner[layer, "A"] in workers
        assert owner[layer, "G"] in workers
    assert (fraction < 1) or found.workers[0] == range(size)
