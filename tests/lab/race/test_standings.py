"""Who was where when: arithmetic on courses made up by hand."""

from __future__ import annotations

import pytest

from gradtide.lab.race.standings import (
    Point,
    arrival,
    falling,
    levels,
    sooner,
    stalls,
    standings,
    target,
)

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


# - Times sooner -----------------------------------------------------------------------


def course(seconds: float, losses: list[float]) -> list[Point]:
    """A look after every lap of so many seconds."""
    return [Point(i * seconds, 10 * i, 0.0, loss) for i, loss in enumerate(losses)]


LEADER = course(10.0, [5.0, 4.5, 4.0, 3.8, 3.9, 3.6, 3.5, 3.55, 3.4])


def test_what_counts_is_the_lowest_loss_up_to_then() -> None:
    assert [point.loss for point in falling(LEADER)][3:6] == [3.8, 3.8, 3.6]
    # From the half of 80 s on: each loss once.
    assert levels(LEADER) == pytest.approx([3.8038, 3.6036, 3.5035, 3.4034])


def test_who_is_twice_as_fast_is_twice_as_soon_at_every_loss() -> None:
    found = sooner(LEADER, [p._replace(seconds=p.seconds / 2) for p in LEADER])
    assert found == pytest.approx((2.0, 2.0, 2.0))
    assert sooner(LEADER, LEADER) == pytest.approx((1.0, 1.0, 1.0))


def test_one_low_look_moves_a_single_moment_and_not_the_median() -> None:
    """What a lucky look of the leader did to the last loss alone."""
    fast = [p._replace(seconds=p.seconds / 2) for p in LEADER]
    fast.append(Point(45.0, 90, 0.0, 3.0))
    lucky = [*LEADER[:-1], LEADER[-1]._replace(loss=3.05)]
    found = sooner(lucky, fast)
    assert found is not None
    assert found.median == pytest.approx(2.0, rel=0.02)
    assert found.lowest < 1.9


def test_who_never_has_a_loss_is_there_0_times_as_soon() -> None:
    found = sooner(LEADER, LEADER[:6])
    assert found is not None
    assert (found.lowest, found.highest) == pytest.approx((0.0, 1.0))
    assert found.median == pytest.approx(0.5)
    assert sooner(LEADER, LEADER[:2]) is None


def test_a_lap_that_took_longer_than_its_neighbours_stalled() -> None:
    even = [Point(float(i), 10 * i, 0, 1.0) for i in range(6)]
    assert stalls(even) == []
    late = [p._replace(seconds=p.seconds + (3.0 if p.steps > 20 else 0)) for p in even]
    (found,) = stalls(late)
    assert found == pytest.approx((20, 4.0))
    first = [p._replace(seconds=p.seconds + (1.5 if p.steps else 0)) for p in even]
    assert [stall.steps for stall in stalls(first)] == [0]


def test_a_warm_up_that_takes_longer_is_no_stall() -> None:
    """Four dense laps, two that are less so, and the sparse ones."""
    times = [8.0] * 4 + [4.0, 2.0] + [1.0] * 8
    ends = [sum(times[:i]) for i in range(len(times) + 1)]
    assert stalls([Point(t, 10 * i, 0, 1.0) for i, t in enumerate(ends)]) == []
