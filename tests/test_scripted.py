"""Models of TorchScript, and with parts of it, are trained as by DDP."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradtide
from tests.ranks import run_ranks


def net(kind: str) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have it compiled
        if kind == "parts":
            layers[0] = torch.jit.script(layers[0])
            layers[2] = torch.jit.trace(layers[2], torch.ones(2, 16))
        whole = nn.Sequential(*layers)
        return torch.jit.script(whole) if kind == "whole" else whole


def trained(scheme: str, kind: str) -> Any:
    model = net(kind)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(8):
        rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 6, generator=rng)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    model.state_dict()
    sync.remove()
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["whole", "parts"])
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "diloco(every=4)"])
def test_what_is_scripted_trains_as_what_is_not(scheme: str, kind: str) -> None:
    plain = run_ranks(2, trained, scheme, "plain")
    assert run_ranks(2, trained, scheme, kind) == plain
    assert plain[0] == plain[1]
