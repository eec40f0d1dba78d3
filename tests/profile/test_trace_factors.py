"""How long factors of real layers take, and what a device takes to invert them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gradtide.planner.network import Device, Network, load
from gradtide.planner.trace import StepTrace
from gradtide.planner.virtual import simulate
from gradtide.profile.network.run import with_curvature
from gradtide.profile.trace.run import Effort, trace
from gradtide.profile.trace.subject import Subject
from gradtide.scheme import parse


def traced(model: nn.Module, x: torch.Tensor) -> StepTrace:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subject = Subject("own", model, optimizer, lambda _: model(x).square().mean())
    return trace(subject, Effort(2, 1))


def test_layers_are_found_and_timed() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2, bias=False), nn.BatchNorm2d(8), nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    found = traced(model, torch.randn(16, 4, 8, 8))
    convolution, linear = found.layers
    assert (convolution.weight, convolution.bias) == ("0.weight", None)
    assert convolution.groups == 2
    assert (linear.weight, linear.bias, linear.groups) == ("3.weight", "3.bias", 1)
    assert min(convolution.a, convolution.g, linear.a, linear.g) > 0
    assert len(before) == len(found.units)
    step = simulate(found, parse("spd_kfac"), Network.ideal(4, 1, 1e9))
    assert step.breakdown is not None


def test_factors_do_not_train() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    subject = Subject("own", model, optimizer, lambda _: model(torch.ones(4, 3)).sum())
    assert trace(subject, Effort(3, 1)).layers
    assert len(steps) == 4  # of the trace alone
    assert not model._forward_hooks


def test_a_model_without_such_layers() -> None:
    assert traced(nn.LayerNorm(4), torch.randn(3, 4)).layers == ()


def test_inversions_are_measured_and_survive_a_file(tmp_path: Path) -> None:
    device = with_curvature(Device(), torch.device("cpu"))
    assert device.inverse is not None
    assert 0 < device.inverse(64) < device.inverse(1024)
    assert device.product.each > 0
    assert device.beside
    network = Network.ideal(2, 1, 1e9, device=device)
    network.save(tmp_path / "network.json")
    assert load(tmp_path / "network.json") == network


def test_a_profile_from_before_is_read_and_says_what_is_missing(tmp_path: Path) -> None:
    file, network = tmp_path / "network.json", Network.ideal(2, 1, 1e9)
    network.save(file)
    document = json.loads(file.read_text())
    for name in ("inverse", "product", "beside"):
        del document["device"][name]
    file.write_text(json.dumps(document))
    known = traced(nn.Linear(3, 2), torch.ones(4, 3))
    assert simulate(known, parse("wfbp"), load(file)).step > 0
    with pytest.raises(ValueError, match="make one with `gradtide profile network`"):
        simulate(known, parse("dp_kfac"), load(file))
