"""Searches for the size of buckets, on functions whose minimum is known."""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import pytest

from gradtide.fusion import (
    Bayesian,
    BinarySearch,
    BySize,
    Search,
    Trace,
    Trial,
    best,
    overlapped,
    search,
)

WHOLE = 400_000_000  # bytes
library = pytest.mark.skipif(
    importlib.util.find_spec("bayes_opt") is None,
    reason="bayesian-optimization is not installed (extra tune)",
)
KINDS = [BinarySearch, pytest.param(Bayesian, marks=library)]


def valley(bottom: float) -> Any:
    """Seconds that grow by a tenth with every doubling away from `bottom` MB."""
    return lambda fusion: 1 + 0.1 * abs(math.log2(fusion.megabytes / bottom))


@pytest.mark.product(each=12)
@pytest.mark.parametrize("bottom", [0.5, 11.0, 400.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bottom_is_found(kind: Any, bottom: float) -> None:
    tried = search(kind(), WHOLE, valley(bottom))
    assert len(tried) <= kind().trials
    assert best(tried).seconds < 1.03
    sizes = [trial.megabytes for trial in tried]
    assert len(set(sizes)) == len(sizes)
    assert all(0.49 <= size <= 401 for size in sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_next_follows_from_what_was_tried(kind: Any) -> None:
    tried = search(kind(), WHOLE, valley(11.0))
    for i in range(0, len(tried), 3):
        assert kind().propose(WHOLE, tried[:i]) == tried[i].megabytes
    assert kind().propose(WHOLE, tried) is None
    assert isinstance(kind(), Search)
    assert not isinstance(BySize(), Search)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [40, 3_000, 1_000_000])
def test_small_models_are_no_trouble(kind: Any, whole: int) -> None:
    tried = search(kind(), whole, lambda _: 1.0)
    assert 1 <= len(tried) <= kind().trials
    assert kind()(Trace([whole // 2] * 2), lambda _: 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_it_cuts_by_times_if_there_are_any(kind: Any) -> None:
    def cost(nbytes: int) -> float:
        return 5e-3 + 1e-9 * nbytes

    sizes = [2_000_000] * 100
    trace = Trace(sizes, backward=[2e-3] * 100)
    found = overlapped(trace, kind()(trace, cost), cost)
    fixed = [0.5 * 400 ** (i / 60) for i in range(61)]
    cuts = [kind().at(size)(trace) for size in fixed]
    assert found <= 1.03 * min(overlapped(trace, cut, cost) for cut in cuts)
    first = kind().at(kind().propose(sum(sizes), ()))
    assert kind()(Trace(sizes), cost) == first(trace)
    assert kind()(trace, lambda _: 0.0) == first(trace)


@pytest.mark.parametrize(
    "wrong", [{"trials": 0}, {"steps": 0}, {"smallest": 0.0}, {"ends": -1.0}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_numbers_are_refused(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least one|positive"):
        kind(**wrong)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    with pytest.raises(ValueError, match=r"gradtide\[tune\]"):
        Bayesian()


def test_of_equal_trials_the_first_counts() -> None:
    assert best([Trial(3.0, 1.0), Trial(1.0, 1.0), Trial(2.0, 2.0)]).megabytes == 3.0
