"""Merging where waiting is cheaper than a start-up."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gradtide.fusion import BySize, Cost, MgWfbp, PerTensor, Trace, overlapped


def linear(alpha: float, beta: float) -> Cost:
    return lambda nbytes: alpha + beta * nbytes


def test_it_waits_only_for_what_is_cheaper_than_a_start_up() -> None:
    # Ready at 1, 2, 2.5 and 9; an exchange takes 1 to start, and 1 for each byte.
    trace = Trace([1, 1, 1, 1], backward=[1.0, 1.0, 0.5, 6.5])
    assert MgWfbp()(trace, linear(1.0, 1.0)) == [
        slice(0, 1),  # to wait for 1 second is no gain
        slice(1, 3),  # the network is busy until 3
        slice(3, 4),
    ]
    assert MgWfbp()(trace, linear(7.0, 1.0)) == [slice(0, 4)]
    assert MgWfbp()(Trace([], backward=[]), linear(1.0, 1.0)) == []


def everything(n: int) -> list[list[slice]]:
    """All ways to cut n tensors."""
    ways = []
    for bits in range(1 << (n - 1)):
        edges = [0, *(i + 1 for i in range(n - 1) if bits >> i & 1), n]
        ways.append([slice(a, b) for a, b in pairwise(edges)])
    return ways


def test_it_is_close_to_the_best_of_all_cuts() -> None:
    ratios = []
    for seed in range(30):
        rng = random.Random(seed)
        nbytes = [rng.choice((10, 1000, 30_000)) for _ in range(10)]
        trace = Trace(nbytes, backward=[rng.expovariate(1e3) for _ in nbytes])
        cost = linear(rng.uniform(1e-4, 3e-3), 1e-7)

        def ends(cuts: list[slice], trace: Trace = trace, cost: Cost = cost) -> float:
            return overlapped(trace, cuts, cost)

        ours = ends(MgWfbp()(trace, cost))
        ratios.append(ours / min(map(ends, everything(len(nbytes)))))
        for other in (BySize(1e9, 1e9), PerTensor()):
            assert ours <= 1.05 * ends(other(trace, cost))
    assert min(ratios) > 1 - 1e-9
    assert sum(ratios) / len(ratios) < 1.08


@pytest.mark.parametrize(
    ("backward", "cost"), [(None, linear(1.0, 1.0)), ([1.0], linear(0.0, 0.0))]
)
def test_without_times_it_says_where_to_get_them(
    backward: list[float] | None, cost: Cost
) -> None:
    with pytest.raises(ValueError, match=r"gradtide profile.*Bayesian"):
        MgWfbp()(Trace([1], backward=backward), cost)
