"""What ranks tell each other in a step is what the planner takes them to tell."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn

import gradtide
from gradtide.planner.steps.exchange import exchange_of
from gradtide.scheme import parse

SIZE = 2  # ranks: each sends its numbers to one


def told(scheme: str, steps: int) -> tuple[int, ...]:
    """Numbers of the last messages, after backward and before the optimizer's step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    sync = gradtide.replicate(model, optimizer, scheme)
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    records = sync.engine.telemetry.records
    sent = {r.bucket: r.payload_bytes // 4 for r in records}
    sync.remove()
    return sent.get("finite", 0), sent.get("alike", 0)


@pytest.mark.parametrize(
    ("scheme", "steps"),
    [("wfbp", 2), ("topk(0.5, schedule='local')", 2), ("diloco(every=2)", 4)],
)
def test_flags_are_those_of_a_real_replica(scheme: str, steps: int) -> None:
    planned = exchange_of(parse(scheme), SIZE, 4, lambda bucket: [])
    for found in run_ranks(SIZE, told, scheme, steps):
        assert found == planned.flags
