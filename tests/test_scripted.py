"""Models of TorchScript, and with parts of it, are trained as by DDP."""

from __future__ import annotations

import copy
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
    forward, sync = model, None
    if scheme == "ddp":
        forward = nn.parallel.DistributedDataParallel(model)
    else:
        sync = gradtide.replicate(model, opt, scheme)
    for step in range(8):
        rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
        forward(torch.randn(8, 6, generator=rng)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    model.state_dict()
    if sync is not None:
        sync.remove()
    return [p.tolist() for p in model.parameters()]


@pytest.mark.product
@pytest.mark.parametrize("kind", ["whole", "parts"])
@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_what_is_scripted_trains_as_by_ddp(scheme: str, kind: str) -> None:
    found = run_ranks(2, trained, scheme, kind)
    assert found == run_ranks(2, trained, "ddp", kind)


def test_scripted_parts_train_in_rounds() -> None:
    found = run_ranks(2, trained, "diloco(every=4)", "parts")
    assert found == run_ranks(2, trained, "diloco(every=4)", "plain")


class Beside(nn.Module):
    """Has a replicated model below it and is none itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def scripted_in_training(scheme: str, kind: str | None) -> Any:
    model = net("plain")
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    beside = Beside(model)
    sync = gradtide.replicate(model, opt, scheme)
    equal = []
    for step in range(8):
        rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
        beside(torch.randn(8, 6, generator=rng)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step > 2 and kind is not None:
            whole = beside if kind == "beside" else model
            whole = copy.deepcopy(model) if kind == "copy" else whole
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scripted = torch.jit.script(whole)
            x = torch.ones(2, 6)
            with torch.no_grad():  # what is read first is what was scripted
                equal.append(torch.equal(scripted(x), model(x)))
            assert kind == "copy" or next(scripted.parameters()) is model[0].weight
    sync.end_round()
    sync.flush()
    return all(equal), [p.tolist() for p in model.parameters()]


@pytest.mark.product(each=12)
@pytest.mark.parametrize("kind", ["model", "copy", "beside"])
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "diloco(every=4)"])
def test_a_model_is_scripted_in_the_middle_of_training(scheme: str, kind: str) -> None:
    found = run_ranks(2, scripted_in_training, scheme, kind)
    assert found == run_ranks(2, scripted_in_training, scheme, None)


def test_the_users_own_hooks_are_scripted() -> None:
    assert all(run_ranks(2, own_hooks))


def double(self, input: tuple[torch.Tensor]) -> tuple[torch.Tensor]:  # type: ignore[no-untyped-def]
    return (input[0] * 2,)


def own_hooks() -> bool:
    model = net("plain")
    model.register_forward_pre_hook(double)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, "dear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
    x = torch.ones(2, 6)
    same = torch.equal(scripted(x), model(x))
    sync.remove()
    return same
