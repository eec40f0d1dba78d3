"""What is timed: the right work, in turns, on residuals in their steady state."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gradtide.profile.selection.measure import (
    COPY,
    TOPK,
    WARMUP,
    Gradients,
    measure,
)
from gradtide.selectors import Exact

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Watched:
    """Exact, but it notes what it was called with, and takes at least `nap` seconds."""

    calls: list[Tensor]
    nap: float = 0.0

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        self.calls.append(x.clone())
        time.sleep(self.nap)
        return Exact()(x, k, state)


def test_gradients_differ_and_have_the_same_scale() -> None:
    gradients = Gradients(50_000, CPU)
    first, second = gradients.draw(), gradients.draw()
    assert first.shape == second.shape == (50_000,)
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 0.05
    assert float(first.norm()) == pytest.approx(float(second.norm()), rel=0.05)


@pytest.mark.parametrize("density", [0.003, 0.01, 0.03])
def test_residuals_are_in_their_steady_state(density: float) -> None:
    gradients = Gradients(100_000, CPU)
    flat, k = gradients.residual(density), round(density * 100_000)
    thresholds = []
    for _ in range(60):
        flat += gradients.draw()
        where = Exact()(flat, k, {})
        thresholds.append(float(flat[where].abs().min()))
        flat[where] = 0
    early, late = (sum(thresholds[i : i + 10]) for i in (10, 50))
    assert late == pytest.approx(early, rel=0.06)


def test_each_round_accumulates_selects_and_takes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients, watched = Gradients(1000, CPU), Watched([])
    monkeypatch.setattr(gradients, "draw", lambda: torch.ones(1000))
    measure(gradients, 0.1, {"it": watched}, 4, 1.0)
    assert len(watched.calls) == WARMUP + 4
    for before, after in pairwise(watched.calls):
        left = before.clone()
        left[Exact()(left, 100, {})] = 0
        torch.testing.assert_close(after, left + 1)


def test_rounds_and_counts() -> None:
    selectors = {"it": Exact()}
    found = measure(Gradients(1000, CPU), 0.01, selectors, 4, 1.0)
    assert list(found) == ["it", TOPK, COPY]
    assert {len(timing.seconds) for timing in found.values()} == {4}
    assert [timing.count for timing in found.values()] == [10, 10, 1000]


def test_what_takes_long_gets_fewer_rounds() -> None:
    slow, fast = Watched([], nap=0.05), Watched([])
    selectors = {"slow": slow, "fast": fast}
    found = measure(Gradients(1000, CPU), 0.1, selectors, 8, 0.08)
    assert len(found["slow"].seconds) == 2
    assert min(found["slow"].seconds) >= 0.05
    assert len(found["fast"].seconds) == 8
