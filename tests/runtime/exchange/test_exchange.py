"""What a step exchanges is one object: another one is a class, and no other line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn

import gradtide
from gradtide.runtime.exchange import Exchange
from gradtide.runtime.layout.buckets import GradientBucket


class Signs:
    """The mean of the signs of all ranks' gradients; all else as gradients have it."""

    def __init__(self, gradients: Exchange) -> None:
        self._gradients = gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gradients, name)

    def now(self) -> Signs:
        return self

    def next(self) -> Signs:
        return self

    def fill(self, bucket: GradientBucket) -> None:
        self._gradients.fill(bucket)
        bucket.payload.flat.sign_()


def _trained(schedule: str, passes: int) -> list[list[Any]]:
    """Parameters after some steps; and those of a loop that averages signs."""
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        draw = torch.Generator().manual_seed(1 + dist.get_rank())
        if ours:
            sync = gradtide.replicate(model, optimizer, schedule)
            actions = sync._training.actions
            actions.use(Signs(actions.gradients))
        for _ in range(4):
            for i in range(passes):
                x = torch.randn(6, 5, generator=draw)
                if ours:
                    sync.be_quiet(i < passes - 1)
                model(x).square().sum().backward()
            for p in model.parameters() if not ours else ():
                assert p.grad is not None
                p.grad.sign_()
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
        if ours:
            sync.remove()
        found.append([p.tolist() for p in model.parameters()])
    return found


@pytest.mark.product
@pytest.mark.parametrize("schedule", ["wfbp", "dear", "sequential"])
def test_another_exchange_is_one_class(schedule: str) -> None:
    for ours, expected in run_ranks(2, _trained, schedule, 2):
        assert ours == expected
