"""A GradScaler that K-FAC was not told of is found out, where it shows."""

from __future__ import annotations

from itertools import product

import torch
from tests.kfac.test_product import KFACS, batch, network, scheme
from tests.ranks import run_ranks
from torch.nn.functional import cross_entropy

import gradtide

# Schedule, whether the optimizer is fused, and the type of gradients.
SHOWS = (
    ("WFBP", False, torch.float16),
    ("WFBP", True, torch.float32),
    ("DEAR", False, torch.float32),
)


def step(
    schedule: str, fused: bool, dtype: torch.dtype, unscale: bool, known: bool
) -> str:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    text = scheme("Dense()", KFACS["mpd"], schedule)
    given = scaler if known else None
    sync = gradtide.replicate(model, opt, text, grad_scaler=given)
    try:
        for number in range(3):
            x, y = batch(number, 0)
            with torch.autocast("cpu", dtype, enabled=dtype is torch.float16):
                loss = cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    except RuntimeError as error:
        return str(error)
    sync.remove()
    return "accepted"


def test_a_forgotten_scaler() -> None:
    def run(known: bool) -> list[str]:
        cases = product(SHOWS, (False, True))
        return [step(*shows, unscale, known) for shows, unscale in cases]

    (forgotten,) = run_ranks(1, run, False)
    assert all("replicate(..., grad_scaler=scaler)" in text for text in forgotten)
    (told,) = run_ranks(1, run, True)
    assert set(told) == {"accepted"}


def test_float16_without_a_scaler() -> None:
    def run() -> str:
        model, (x, y) = network(), batch(0, 0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        none = torch.amp.GradScaler("cpu", enabled=False)
        gradtide.replicate(model, opt, "mpd_kfac", grad_scaler=none)
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return "accepted"

    assert run_ranks(1, run) == ["accepted"]
