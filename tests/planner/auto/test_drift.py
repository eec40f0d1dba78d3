"""A change that lasts is told from what passes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from gradtide.planner.auto.drift import CHANGED, STEPS, Drift


def looked(drift: Drift, seconds: Sequence[float], start: int = 0) -> list[int]:
    """The numbers of the steps after which a drift is seen."""
    found, now = [], 0.0
    for step, each in enumerate(seconds, start + 1):
        now += each
        drift.note(now, step)
        if drift.seen:
            found.append(step)
    return found


@pytest.mark.parametrize("factor", [CHANGED, 5.0, 1 / 5])
def test_a_change_that_lasts_is_seen_within_a_hundred_steps(factor: float) -> None:
    drift = Drift()
    found = looked(drift, [1.0] * 60 + [1.01 * factor if factor > 1 else factor] * 100)
    assert 60 < found[0] < 60 + STEPS
    assert drift.seen


def test_a_change_soon_after_a_decision_is_seen() -> None:
    """Where steps are slow, a network may change before there were many of them."""
    assert looked(Drift(), [3.0] * 8 + [0.4] * 60)


def test_what_does_not_last_is_no_change() -> None:
    steps = [1.0 + (step % 10 == 0) * 50 for step in range(500)]  # evaluations, say
    steps[200:208] = [30.0] * 8
    assert not looked(Drift(), steps)
    assert not looked(Drift(), [1.0, CHANGED - 0.02] * 200)


def test_steps_after_a_warm_up_are_others() -> None:
    steps = [5.0] * 100 + [1.0] * 100
    assert not looked(Drift(breaks=range(100, 101)), steps)
    assert looked(Drift(), steps)


def test_what_was_looked_at_in_vain_is_looked_at_less_and_less() -> None:
    drift, now, step, seen = Drift(), 0.0, 0, []
    for phase in range(40):  # it always changes
        for _ in range(50):
            step, now = step + 1, now + (1.0, 3.0)[phase % 2]
            drift.note(now, step)
            if drift.seen:
                seen.append(step)
                drift.look_later()
    pauses = [after - before for before, after in itertools.pairwise(seen)]
    assert pauses == sorted(pauses)
    assert len(seen) < 7
