"""The shortest possible step, by hand."""

from __future__ import annotations

import pytest

from gradtide.core.schedule import DEAR, SEQUENTIAL, WFBP, Schedule
from gradtide.planner.clock.limits import limit_seconds


@pytest.mark.parametrize(
    ("schedule", "wire", "expected"),
    [
        (WFBP, (3.0, 3.0), 1 + 6),
        (WFBP, (0.5, 0.5), 1 + 2),  # all hidden
        (SEQUENTIAL, (3.0, 3.0), 1 + 2 + 6),
        (DEAR, (3.0, 3.0), 3 + 3),
        (DEAR, (0.5, 0.5), 1 + 2),
        (DEAR, (1.5, 1.5), 1.5 + 2),
        (Schedule("backward", "forward"), (3.0, 3.0), 3 + 2 + 3),
    ],
)
def test_by_hand(
    schedule: Schedule, wire: tuple[float, float], expected: float
) -> None:
    assert limit_seconds(1.0, 2.0, wire, schedule) == pytest.approx(expected)
