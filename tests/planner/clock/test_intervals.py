"""Work that goes on slower for a while ends later by what it has missed."""

from __future__ import annotations

import pytest

from gradtide.planner.clock.intervals import gap, held_up, stretched, union


@pytest.mark.parametrize(
    ("start", "seconds", "end"),
    [(0, 1, 1), (0, 2, 2), (0, 3, 4), (0, 4, 6), (0, 5, 7), (3, 1, 5), (9, 1, 10)],
)
def test_work_is_stretched_while_something_else_is_busy(
    start: float, seconds: float, end: float
) -> None:
    assert stretched(start, seconds, [(2, 6)], 2.0) == end


def test_a_union_is_in_order_and_does_not_overlap() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert union([]) == []


@pytest.mark.parametrize(
    ("start", "seconds", "end"),
    [(0, 2, 2), (0, 3, 4), (0, 3.5, 7), (0, 4, 8), (0, 5, 9), (5, 1, 8), (9, 1, 10)],
)
def test_what_is_taken_is_not_there(start: float, seconds: float, end: float) -> None:
    """Half the speed from 2 to 8, and none from 4 to 6."""
    ends = held_up(start, seconds, [(2, 8)], 2.0, [(4, 6)], float("inf"))
    assert ends == pytest.approx(end)


def test_a_gap_is_the_first_that_is_long_enough() -> None:
    busy = [(1.0, 2.0), (2.5, 4.0)]
    assert gap(busy, 0.0, 1.0) == 0.0
    assert gap(busy, 0.5, 0.5) == 0.5
    assert gap(busy, 0.5, 0.6) == 4.0
    assert gap(busy, 1.5, 0.5) == 2.0
    assert gap(busy, 5.0, 1.0) == 5.0
