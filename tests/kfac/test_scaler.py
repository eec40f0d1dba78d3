"""A GradScaler that K-FAC was not told of is found out, however it is used."""

from __future__ import annotations

import pytest
import torch
from tests.kfac.test_product import KFACS, batch, network, scheme
from tests.ranks import run_ranks
from torch.nn.functional import cross_entropy

import gradtide


def step(known: bool, scale: float, unscale: bool, schedule: str, fused: bool) -> str:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    text = scheme("Dense()", KFACS["mpd"], schedule)
    given = scaler if known else None
    sync = gradtide.replicate(model, opt, text, grad_scaler=given)
    try:
        for number in range(3):
            x, y = batch(number, 0)
            scaler.scale(cross_entropy(model(x), y)).backward()
            if unscale:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    except RuntimeError as error:
        return str(error)
    sync.remove()
    return "accepted"


@pytest.mark.parametrize("schedule", ["WFBP", "DEAR"])
def test_a_forgotten_scaler(schedule: str) -> None:
    def run() -> list[str]:
        fused = (False,) if schedule == "DEAR" else (False, True)
        return [
            step(known, 8.0, unscale, schedule, f)
            for known in (False, True)
            for unscale in (False, True)
            for f in fused
        ]

    (found,) = run_ranks(1, run)
    forgotten, told = found[: len(found) // 2], found[len(found) // 2 :]
    assert all("replicate(..., grad_scaler=scaler)" in text for text in forgotten)
    assert set(told) == {"accepted"}


def test_a_scale_of_one_is_none() -> None:
    def run() -> str:
        return step(False, 1.0, False, "WFBP", False)

    assert run_ranks(1, run) == ["accepted"]
