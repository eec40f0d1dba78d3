"""What several ranks' traces have in common."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradtide.planner.measuring.medians import across
from gradtide.planner.trace import StepTrace, Unit


def trace(seconds: float) -> StepTrace:
    units = (Unit("b", 3, 4, seconds, 2 * seconds, 0.0), Unit("a", 2, 4, 1.0, 1.0, 0.0))
    return StepTrace("t", units, optimizer=seconds, loss=3 * seconds)


def test_medians_over_ranks_in_rank_0s_order() -> None:
    slow = trace(9.0)
    other = replace(slow, units=slow.units[::-1])
    found = across([trace(1.0), other, trace(2.0)])
    assert [unit.name for unit in found.units] == ["b", "a"]
    assert found.units[0].forward == 2.0
    assert found.units[0].backward == 4.0
    assert (found.optimizer, found.loss) == (2.0, 6.0)


def test_other_models_are_refused() -> None:
    other = StepTrace("t", (Unit("c", 3, 4, 1.0, 1.0, 0.0),), 0.0)
    with pytest.raises(ValueError, match="rank 1 traced other parameters"):
        across([trace(1.0), other])
