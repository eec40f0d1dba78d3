"""Laps of the training thread."""

from __future__ import annotations

import time

import pytest
import torch

from gradtide.planner.tuning.online import Clock


def test_laps_on_the_host() -> None:
    clock = Clock(torch.device("cpu"))
    clock.reset()
    time.sleep(0.02)
    first = clock.lap()
    second = clock.lap()
    assert first is not None
    assert first >= 0.02
    assert second is not None
    assert second < first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_laps_on_the_device_are_known_one_later() -> None:
    clock = Clock(torch.device("cuda"))
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    clock.reset()
    for _ in range(20):
        x @ x
    assert clock.lap() is None
    long = clock.lap()
    short = clock.lap()
    assert long is not None
    assert short is not None
    assert long > 5 * short
