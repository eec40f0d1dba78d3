"""What a training thread waits for, and what slows it, by stage."""

from __future__ import annotations

import pytest

from gradtide.core.engine import Record
from gradtide.planner.steps.stages import exposed, shares

RECORDS = (
    Record("grad0", "AllReduce", 1, 0.0, 2.0),
    Record("kfac.A0", "AllReduce", 1, 2.0, 5.0),
    Record("kfac.inverse0", "AllGather", 1, 8.0, 9.0),
)
INVERTING = ((4.0, 7.0),)


def test_what_is_on_the_wire_counts_first() -> None:
    found = shares([(1.0, 10.0)], RECORDS, INVERTING)
    assert found == {
        "gradient_comm": 1.0 + 1.0 + 1.0,  # and where nothing goes on
        "factor_comm": 3.0,
        "inverse_comp": 2.0,
        "inverse_comm": 1.0,
    }


def test_slowed_seconds_are_dealt_out_by_what_goes_on_meanwhile() -> None:
    found = exposed([(6.0, 10.0)], [(0.0, 6.0)], 3.0, RECORDS, INVERTING)
    assert found["factor_comm"] == pytest.approx(3.0 * 3 / 6)
    assert found["gradient_comm"] == pytest.approx(2.0 + 3.0 * 2 / 6)
    assert found["inverse_comp"] == pytest.approx(1.0 + 3.0 * 1 / 6)
    assert sum(found.values()) == pytest.approx(4.0 + 3.0)


def test_nothing_goes_on() -> None:
    found = exposed([], [(0.0, 1.0)], 0.25, (), ())
    assert found["gradient_comm"] == 0.25
