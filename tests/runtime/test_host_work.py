"""What the training thread does in a step, by counts: a device may wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn

import gradtide
from gradtide.runtime.training import Training

BUCKETS = "Cuts((1, 3, 5, 7, 8))"


def in_training(scheme: str) -> tuple[Any, Any]:
    """A step of a small model, warm, and its optimizer's parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    sync = gradtide.replicate(net, opt, scheme)
    x = torch.full((2, 4), float(dist.get_rank()))

    def step() -> None:
        net(x).sum().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(4):
        step()
    return step, sync


def optimizer_steps(here: bool) -> tuple[int, list[Any]]:
    """How often a step steps the optimizer; `here`: whether means are at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "here", lambda *_: here)
        step, sync = in_training(f"Scheme(Dense(), {BUCKETS}, DEAR)")
        own, count = torch.optim.AdamW._init_group, []

        def counted(*args: Any, **kwargs: Any) -> Any:
            count.append(1)
            return own(*args, **kwargs)

        patch.setattr(torch.optim.AdamW, "_init_group", counted)
        step()
        found = len(count)
        sync.flush()
        return found, [p.tolist() for p in sync._training.model.parameters()]


def counts() -> list[Any]:
    return [optimizer_steps(here) for here in (False, True)]


def test_updates_whose_means_are_here_are_one_step_of_the_optimizer() -> None:
    for (apart, one), (together, other) in run_ranks(2, counts):
        # step() is one more, which finds no gradients.
        assert (apart, together) == (5 + 1, 1 + 1)
        assert one == other
