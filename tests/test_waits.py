"""With dense exchanges the host waits for no device, but where this says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradtide
from gradtide.runtime.guards.nonfinite import is_finite
from tests.host_waits import watched
from tests.ranks import run_ranks

BEFORE, STEPS = 4, 3
NORMS = {
    "runtime/deferred/partial_norms:measure: tolist": STEPS
}  # of what all ranks are told


def by_torch(net: nn.Module, sync: Any) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=True)


def by_sync(net: nn.Module, sync: Any) -> None:
    sync.clip_grad_norm_(0.1)


def nothing(net: nn.Module, sync: Any) -> None: ...


def waits(scheme: str, between: Callable[[nn.Module, Any], None]) -> dict[str, int]:
    """Where the host would wait in some steps, and how often."""
    with watched() as found:
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 300))
        net.append(nn.BatchNorm1d(300))
        opt = torch.optim.AdamW(net.parameters(), lr=0.01)
        sync = gradtide.replicate(net, opt, scheme)
        rng = torch.Generator().manual_seed(dist.get_rank())
        for step in range(BEFORE + STEPS):
            if step == BEFORE:
                found.clear()
            net(torch.randn(6, 12, generator=rng)).square().mean().backward()
            between(net, sync)
            opt.step()
            opt.zero_grad()
        seen = Counter(found)
        sync.remove()
    return dict(seen)


@pytest.mark.product(each=6)
@pytest.mark.parametrize(
    ("scheme", "between", "expected"),
    [
        ("wfbp", nothing, {}),
        ("wfbp", by_torch, {}),
        ("wfbp", by_sync, {}),
        ("dear", nothing, {}),
        ("dear", by_torch, NORMS),
        ("dear", by_sync, NORMS),
        ("dear(wire='bf16')", nothing, {}),
        (
            "Scheme(Dense(), BySize(0.1), WFBP, KFAC())",
            nothing,
            {
                "kfac/parts:told: cpu": STEPS,
                "kfac/invert:inverse: __bool__": STEPS * 2 * 2,
            },
        ),
        (
            "Scheme(TopK(1.0), BySize(0.1), LOCAL)",
            nothing,
            {
                "runtime/guards/nonfinite:not_finite: tolist": STEPS,
                "runtime/exchange/steps:message: __bool__": STEPS,
            },
        ),
    ],
)
def test_nothing_waits(
    scheme: str, between: Callable[[nn.Module, Any], None], expected: dict[str, int]
) -> None:
    for found in run_ranks(2, waits, scheme, between):
        assert found == expected


def test_a_wait_is_seen() -> None:
    """Of what the parameters' device would have, and of nothing that the host has."""
    with watched() as found:
        for where in ("cpu", None):
            x = torch.ones(2, device=where)
            for each in (x, x + 1):
                is_finite(each)
    assert found == ["runtime/guards/nonfinite:is_finite: __bool__"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "dear(wire='bf16')"])
def test_nothing_waits_on_a_gpu(scheme: str, tmp_path: Path) -> None:
    """torch raises for what does."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group(init_method=store, rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 3)).cuda()
        opt = torch.optim.AdamW(net.parameters(), lr=0.01)
        sync = gradtide.replicate(net, opt, scheme)
        for step in range(BEFORE + STEPS):
            if step == BEFORE:
                torch.cuda.set_sync_debug_mode("error")
            net(torch.ones(6, 12, device="cuda")).square().mean().backward()
            if scheme == "wfbp":
                sync.clip_grad_norm_(0.1)
            opt.step()
            opt.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
