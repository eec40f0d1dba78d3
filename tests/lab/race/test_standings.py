"""Who was where when: arithmetic on courses made up by hand."""

from __future__ import annotations

import pytest

from gradtide.lab.race.standings import Point, arrival, standings, target

SLOW = [
    Point(0.0, 0, 0.0, 5.0),
    Point(10.0, 20, 100.0, 4.0),
    Point(20.0, 40, 200.0, 3.0),
    Point(30.0, 60, 300.0, 3.2),
]
FAST = [Point(0.0, 0, 0.0, 5.0), Point(8.0, 20, 40.0, 4.0), Point(16.0, 40, 80.0, 2.0)]


def test_the_target_is_the_lowest_loss_and_not_the_last() -> None:
    assert target(SLOW) == pytest.approx(3.003)


def test_who_takes_the_same_steps_is_there_whatever_the_order_of_sums() -> None:
    rounded = [point._replace(loss=(1 + 1e-6) * point.loss) for point in SLOW]
    _, second = standings({"slow": SLOW, "rounded": rounded}, "slow")
    assert second.arrival == pytest.approx((20.0, 40, 200.0, 3.003), rel=2e-3)


def test_between_two_looks_the_course_is_a_straight_line() -> None:
    found = arrival(FAST, 3.0)
    assert found is not None
    assert found == pytest.approx((12.0, 30, 60.0, 3.0))


def test_who_comes_back_up_was_there_the_first_time() -> None:
    waves = [*FAST, Point(24.0, 60, 120.0, 4.0), Point(32.0, 80, 160.0, 1.0)]
    assert arrival(waves, 3.0) == arrival(FAST, 3.0)


def test_who_never_has_the_loss_never_arrives() -> None:
    assert arrival(FAST, 1.9) is None
    assert arrival(FAST[:1], 3.0) is None


def test_who_begins_below_the_loss_needs_no_time() -> None:
    assert arrival(FAST, 6.0) == FAST[0]


def test_the_first_contestant_is_held_against_the_same_rule() -> None:
    first, second = standings({"slow": SLOW, "fast": FAST}, "slow")
    assert first.arrival == pytest.approx((19.97, 39.94, 199.7, 3.003))
    assert second.arrival == pytest.approx((11.988, 29.97, 59.94, 3.003))
    assert (first.last.steps, second.last.steps) == (60, 40)
