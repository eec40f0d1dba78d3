"""Owners of matrices: balanced, alike on every rank, and what travels together."""

from __future__ import annotations

import random

import pytest

from gradtide.optim.owners import assign, cost, together

# Twelve layers of a transformer: attention and its projection, two of a perceptron.
LAYERS = 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)]


def test_the_cost_is_that_of_the_multiplications_either_way_round() -> None:
    assert cost(2, 3, 1) == 2 * 2 * 3 + 2 * 2 * 2 + 2 * 2 * 3
    assert cost(3, 2, 5) == 5 * cost(2, 3, 1)
    assert cost(1, 1, 0) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_layers_of_a_transformer_are_divided_evenly(size: int) -> None:
    costs = [cost(*shape, 5) for shape in LAYERS]
    loads = [0.0] * size
    for owner, one in zip(assign(costs, size), costs, strict=True):
        loads[owner] += one
    assert max(loads) < 1.1 * sum(costs) / size


def test_a_rank_may_own_nothing_and_nothing_may_be_owned() -> None:
    assert sorted(assign([1.0, 2.0], 4)) == [0, 1]
    assert assign([], 3) == []
    assert together([], [], [], 10) == []


@pytest.mark.parametrize("most", [1, 50, 200, 10_000])
def test_every_matrix_travels_once_and_parts_are_even(most: int) -> None:
    rng = random.Random(most)
    costs = [float(rng.randint(1, 9)) for _ in range(20)]
    numels = [rng.randint(1, 60) for _ in costs]
    owners = assign(costs, 3)
    messages = together(owners, costs, numels, most)
    assert sorted(i for m in messages for i in m) == [*range(20)]
    for message in messages:
        counts = [sum(owners[i] == rank for i in message) for rank in range(3)]
        last = message is messages[-1]
        assert last or max(counts) - min(counts) <= 1
        # A turn is not divided, and two turns are joined only where both fit.
        assert max(counts) == 1 or sum(numels[i] for i in message) <= most
