"""Fits find what times were made of."""

from __future__ import annotations

import numpy as np
import pytest

from gradtide.planner.measuring.fit import Point, beyond_burst, fit
from gradtide.planner.network import Rate

SIZES = [1e3, 1e4, 1e5, 1e6, 1e7]


def points(
    alpha: float, beta: float, noise: float = 0.0, starts: float = 7
) -> list[Point]:
    random = np.random.default_rng(0)
    return [
        Point(
            "ReduceScatter",
            int(size),
            starts,
            size,
            (alpha * starts + beta * size) * (1 + noise * random.standard_normal()),
        )
        for size in SIZES
        for _ in range(4)
    ]


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("beta", [1e-10, 1.6e-7])
def test_recovers_alpha_and_beta(alpha: float, beta: float) -> None:
    found = fit(points(alpha, beta))
    assert found.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert found.beta == pytest.approx(beta, rel=1e-6)
    assert found.residual < 1e-6


def test_noise_is_the_residual() -> None:
    found = fit(points(1e-4, 8e-8, noise=0.03))
    assert found.alpha == pytest.approx(1e-4, rel=0.05)
    assert found.beta == pytest.approx(8e-8, rel=0.05)
    assert 0.015 < found.residual < 0.05


def test_outliers_pull_little_and_are_seen_in_the_residual() -> None:
    some = points(1e-4, 8e-8, noise=0.01)
    some[3] = Point("x", 1000, 7, 1e3, 10 * some[3].seconds)
    some[17] = Point("x", 10**7, 7, 1e7, 5 * some[17].seconds)
    found = fit(some)
    assert found.alpha == pytest.approx(1e-4, rel=0.05)
    assert found.beta == pytest.approx(8e-8, rel=0.05)
    assert found.residual > 0.2


def test_one_late_answer_is_no_start() -> None:
    """Among sizes that are mostly carried, one request took twice as long."""
    some = [p for p in points(1e-3, 1e-7) if p.nbytes >= 1e6]
    some[0] = Point(some[0].name, some[0].nbytes, 7, 1e6, 2 * some[0].seconds)
    assert fit(some).alpha == pytest.approx(1e-3, rel=0.1)


def test_nothing_is_negative() -> None:
    """Times that grow faster than bytes would need a negative start-up."""
    some = [Point("x", int(n), 1, n, 1e-9 * n * n) for n in (10.0, 20.0, 30.0)]
    found = fit(some)
    assert found.alpha == 0
    assert found.beta > 0
    falling = fit([Point("x", int(n), 1, n, 1 / n) for n in (10.0, 20.0, 30.0)])
    assert falling.beta == 0
    assert falling.alpha > 0


def test_one_size_only() -> None:
    found = fit([Point("x", 8, 1, 8.0, 4.0)])
    assert found(8.0) == pytest.approx(4.0)
    assert fit([]) == Rate()


def test_what_slipped_through_a_token_bucket_is_left_out() -> None:
    beta, burst = 1.6e-7, 131_072
    some = [
        Point("x", int(n), 7, n, 1e-4 + beta * max(n - burst, 0.0))
        for n in (1e3, 3e4, 1e5, 1e6, 3e6, 9e6)
    ]
    kept, slipped = beyond_burst(some)
    assert [p.nbytes for p in slipped] == [1000, 30_000, 100_000]
    assert fit(kept).beta == pytest.approx(beta, rel=0.1)  # 13 % of the smallest
    assert beyond_burst(points(1e-4, beta)) == (points(1e-4, beta), [])


def test_a_rate_that_is_known_says_what_slipped_through() -> None:
    some = [Point("x", 1, 1, 1e6, seconds) for seconds in (0.1, 0.16, 0.2)]
    kept, slipped = beyond_burst(some, 50e6)
    assert [p.seconds for p in slipped] == [0.1]
    assert [p.seconds for p in kept] == [0.16, 0.2]


def test_noise_is_no_burst() -> None:
    some = [Point("x", 1, 1, n, s) for n, s in ((1, 0.1), (2, 0.1), (3, 0.1), (4, 9.0))]
    assert beyond_burst(some) == (some, [])


@pytest.mark.parametrize("rate", [50e6, 200e6])
def test_small_requests_that_overlap_do_not_make_the_link_faster(rate: float) -> None:
    """As on a shaped link: starting and carrying at once, and a burst for nothing."""
    alpha, beta, burst = 2e-4, 8 / rate, 50_000
    random = np.random.default_rng(0)
    some = [
        Point("AllToAll", int(n), 7, n, max(7 * alpha, beta * n) * noise)
        for n in np.geomspace(4e3, 3e6, 6)
        for noise in 1 + 0.02 * random.standard_normal(5)
    ]
    some += [
        Point("AllToAll", int(n), 7, n, 7 * alpha + beta * max(n - burst, 0.0))
        for n in (4e3, 2e4, 8e4)
    ]
    kept, _ = beyond_burst(some, rate)
    assert fit(kept).beta == pytest.approx(beta, rel=0.02)
