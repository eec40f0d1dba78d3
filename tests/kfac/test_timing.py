"""The model of inversion times, and that something is measured at all."""

from __future__ import annotations

import pytest
import torch

from gradtide.kfac.costs import InverseTime, estimate_inverses, time_inverses

DIMS = (16, 64, 200, 512, 1024, 2048)


@pytest.mark.parametrize("power", [2.0, 2.7, 3.0])
def test_a_fit_finds_the_model_again(power: float) -> None:
    true = InverseTime(1e-4, 3e-11, power)
    found = InverseTime.fit({d: true(d) for d in DIMS})
    for d in (*DIMS, 30, 1500, 3000):
        assert found(d) == pytest.approx(true(d), rel=0.02)


def test_a_fit_of_noisy_times_is_never_negative() -> None:
    times = {d: max(1e-5, 1e-10 * d**3) * (1.3 if d % 3 else 0.7) for d in DIMS}
    found = InverseTime.fit(times)
    assert all(found(d) > 0 for d in range(1, 4000, 50))
    assert InverseTime.fit({10: 3.0, 1000: 1.0})(100) == pytest.approx(1.5, rel=0.7)


def test_one_time_alone_is_a_cubic() -> None:
    assert InverseTime.fit({100: 1e-3})(200) == pytest.approx(8e-3)


@pytest.mark.parametrize("form", ["inverse", "eigen"])
def test_times_grow(form: str) -> None:
    times = time_inverses([4, 300, 4], torch.device("cpu"), form)  # type: ignore[arg-type]
    assert list(times) == [4, 300]
    assert 0 < times[4] < times[300]


def test_of_many_sizes_a_few_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def fake(dims: set[int], device: torch.device, form: str) -> dict[int, float]:
        measured.extend(dims)
        return {d: 1e-9 * d**3 for d in dims}

    monkeypatch.setattr("gradtide.kfac.costs.time_inverses", fake)
    times = estimate_inverses(range(10, 500, 10), torch.device("cpu"))
    assert len(measured) == 8
    assert {10, 490} <= set(measured)
    assert times[150] == pytest.approx(1e-9 * 150**3, rel=0.01)
    assert estimate_inverses([7], torch.device("cpu")) == {7: 1e-9 * 343}
