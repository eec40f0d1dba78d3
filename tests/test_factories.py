"""What is made in training depends on no default device and no default dtype."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradtide
from gradtide.scheme.recipes import RECIPES
from tests.ranks import run_ranks
from tests.test_layers import ROOT

# What draws or measures for a command line, and not in a user's training.
COMMANDS = {"lab", "profile", "doctor", "simulate", "planner"}
MAKERS = {"tensor", "zeros", "ones", "empty", "full", "eye", "linspace"}
MAKERS |= {"arange", "rand", "randn", "randint", "randperm"}


def made(path: Path) -> Iterator[tuple[int, set[str | None]]]:
    """The line and the keywords of every call that makes a tensor of its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = ast.unparse(node.func)
        if name.startswith("torch.") and name[len("torch.") :] in MAKERS:
            yield node.lineno, {keyword.arg for keyword in node.keywords}


def test_every_tensor_says_where_and_of_what_it_is() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] not in COMMANDS:
            for line, keywords in made(path):
                if not {"device", "dtype"} <= keywords:
                    found.append(f"{path.relative_to(ROOT)}:{line}")
    assert not found, "a factory without device= or dtype="


def trained(scheme: str, device: str | None, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 16)
    )
    net.append(nn.Linear(16, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    rng = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(8, 6, generator=rng) for _ in range(7)]
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        sync = gradtide.replicate(net, opt, scheme)
        for x in inputs:
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        sync.end_round()
        sync.remove()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return [p.tolist() for p in net.parameters()]


def both(schemes: list[str]) -> list[str]:
    """The schemes that depend on defaults, by their values or by what they raise."""
    usual = None, torch.float32
    found = []
    for scheme in schemes:
        told = [trained(scheme, *how) for how in (usual, ("meta", torch.float64))]
        if told[0] != told[1]:
            found.append(scheme)
    return found


@pytest.mark.product
@pytest.mark.parametrize("part", range(4))
def test_recipes_train_alike_with_other_defaults(part: int) -> None:
    names = [name for name in RECIPES if name != "auto"]
    names += [
        "exdyna(0.05, schedule='local')",
        "wfbp(wire='e3m0')",
        "dear(wire='fp16')",
    ]
    assert run_ranks(2, both, names[part::4]) == [[], []]
