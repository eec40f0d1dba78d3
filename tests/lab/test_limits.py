"""The shortest possible step, by hand."""

from __future__ import annotations

import pytest

from gradtide.core.schedule import DEAR, SEQUENTIAL, WFBP, Schedule
from gradtide.lab.limits import limit_seconds
from gradtide.lab.workloads.workload import Timing

RATE = 8e6  # bits/s: a megabyte a second
COMPUTE = Timing(forward=1.0, backward=2.0)


@pytest.mark.parametrize(
    ("schedule", "megabytes", "expected"),
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
    schedule: Schedule, megabytes: tuple[float, float], expected: float
) -> None:
    first, second = (1e6 * part for part in megabytes)
    assert limit_seconds(COMPUTE, (first, second), RATE, schedule) == pytest.approx(
        expected
    )


def test_no_rate_no_limit() -> None:
    assert limit_seconds(COMPUTE, (1.0, 1.0), None, WFBP) is None
