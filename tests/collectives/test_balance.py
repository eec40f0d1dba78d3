"""The arithmetic that all ranks do alike, against brute force."""

from __future__ import annotations

import math
import random

import pytest

from gradtide.collectives._balance import (
    POINTS,
    START,
    Curve,
    could_pay,
    curve_ranks,
    pays,
    recut,
    shares,
    worth_moving,
)


def curve(magnitudes: list[float]) -> Curve:
    ranked = sorted(magnitudes, reverse=True)
    ranks = curve_ranks(len(ranked))
    return Curve([-math.log2(ranked[rank - 1]) for rank in ranks], ranks)


@pytest.mark.parametrize(
    ("numel", "density", "size", "expected"),
    [
        (25_600_000, 0.01, 8, True),
        (25_600_000, 0.6, 8, True),
        (25_600_000, 2 / 3, 8, False),  # 1.5 k twice is 2 n
        (25_600_000, 1.0, 8, False),
        (1000, 0.01, 16, False),  # fewer entries than ranks
        (10_000, 0.01, 8, True),
        (128, 0.1, 8, False),  # the small messages alone cost more
        (1_000_000, 0.01, 1, False),
    ],
)
def test_what_is_sent_dense(numel: int, density: float, size: int, expected: bool):
    assert pays(numel, round(density * numel), size) is expected


@pytest.mark.parametrize("count", [1, 2, 10, 1000, 256_000, 1 << 31])
def test_curves_are_sampled_from_the_largest_to_the_last(count: int) -> None:
    ranks = curve_ranks(count)
    assert len(ranks) == POINTS
    assert ranks == sorted(ranks)
    assert (ranks[0], ranks[-1]) == (1, count)


@pytest.mark.parametrize("size", [1, 2, 5, 16])
@pytest.mark.parametrize("tail", [1.0, 3.0])
def test_shares_are_those_of_the_exact_top(size: int, tail: float) -> None:
    rng = random.Random(size)
    # Owners differ in number and in scale.
    rows = [
        [rng.paretovariate(tail) * (1 + r / 3) for _ in range(2000 + 500 * r)]
        for r in range(size)
    ]
    k = 900 * size
    numbers, level = shares([curve(row) for row in rows], k)
    threshold = sorted((x for row in rows for x in row), reverse=True)[k - 1]
    exact = [sum(x >= threshold for x in row) for row in rows]
    assert sum(numbers) == k
    assert numbers == pytest.approx(exact, rel=0.05, abs=5)
    assert 2.0**level == pytest.approx(threshold, rel=0.5)


@pytest.mark.parametrize("k", [1, 2, 3, 7, 20, 29, 30, 31, 1000])
def test_shares_never_exceed_what_there_is(k: int) -> None:
    rows = [[1.0] * 20, [], [5.0, 2.0, 1.0], [0.5] * 6, [3.0]]
    curves = [curve(row) if row else Curve([], []) for row in rows]
    numbers, _ = shares(curves, k)
    assert sum(numbers) == min(k, 30)
    assert all(0 <= n <= len(row) for n, row in zip(numbers, rows, strict=True))


def test_a_single_infinity_is_among_the_winners() -> None:
    many = curve([2.0**10 + i for i in range(1000)])
    ranks = curve_ranks(500)
    one = Curve([-1025.0 if rank == 1 else 5.0 for rank in ranks], ranks)
    for k in (8, 100, 900, 1100):
        numbers, _ = shares([many, one, many], k)
        assert numbers[1] >= 1
        assert sum(numbers) == k


def test_shares_of_random_curves_sum_to_k() -> None:
    rng = random.Random(0)
    for _ in range(300):
        rows = [
            [
                rng.choice([0.1, 1.0, rng.random() + 1e-9])
                for _ in range(rng.randrange(40))
            ]
            for _ in range(rng.randrange(1, 9))
        ]
        k = rng.randrange(1, 150)
        curves = [curve(row) if row else Curve([], []) for row in rows]
        numbers, _ = shares(curves, k)
        assert sum(numbers) == min(k, sum(map(len, rows)))
        assert all(0 <= n <= len(row) for n, row in zip(numbers, rows, strict=True))


@pytest.mark.parametrize(
    "lengths", [[8], [80, 0, 0, 0], [0, 0, 0], [16, 160, 8, 8, 808], [8, 8, 8, 8]]
)
def test_a_new_cut_keeps_the_stream(lengths: list[int]) -> None:
    moves = recut(lengths, 8)
    assert [sum(row) for row in moves] == lengths
    lands = [sum(column) for column in zip(*moves, strict=True)]
    assert all(new % 8 == 0 for new in lands)
    assert max(lands) - min(lands) <= 8 * 2
    stream = [(r, i) for r, length in enumerate(lengths) for i in range(length)]
    cut = iter(stream)
    own = [iter([(r, i) for i in range(length)]) for r, length in enumerate(lengths)]
    for column in zip(*moves, strict=True):  # receivers concatenate in rank order
        for r, number in enumerate(column):
            for _ in range(number):
                assert next(own[r]) == next(cut)


def test_messages_are_evened_out_where_the_ring_gains_more_than_they_cost() -> None:
    even, skewed = [10 * START] * 8, [80 * START, *[0] * 7]
    assert not worth_moving(recut(even, 8))
    assert worth_moving(recut(skewed, 8))
    assert not worth_moving(recut([80 * 8, *[0] * 7], 8))  # too little to be worth it
    assert not worth_moving(recut([20 * START, 0], 8))  # one step: nothing to gain
    assert not worth_moving(recut([8], 8))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 32])
def test_what_could_pay_is_never_less_than_what_does(size: int) -> None:
    rng = random.Random(size)
    worth = 0
    for _ in range(200):
        spread = rng.choice([10, START // 8, START])
        lengths = [8 * rng.randrange(spread) for _ in range(size)]
        moving = sum(lengths) > 0 and worth_moving(recut(lengths, 8))
        worth += moving
        assert could_pay(lengths) or not moving
    assert worth or size <= 2
    assert not could_pay([START] * size)
