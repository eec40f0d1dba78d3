"""The virtual engine asks for the same things, in the same order, as a real replica."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn

import gradtide
from gradtide.planner.network import Network
from gradtide.planner.trace import StepTrace, Unit
from gradtide.planner.virtual import Run
from gradtide.scheme import parse

STEPS, SIZE, WIDTH = 5, 2, 96
SCHEMES = (
    "Scheme(Dense(), PerTensor(), SEQUENTIAL)",
    "Scheme(Dense(), BySize(0.04, ends=0.02), WFBP)",
    "Scheme(Dense('bf16'), BySize(0.04, ends=0.02), DEAR)",
    "Scheme(Dense(), PerTensor(), DEAR)",
    "Scheme(TopK(0.05), PerTensor(), WFBP)",
    "Scheme(TopKA2A(0.05), BySize(0.04, ends=0.02), WFBP)",
    "Scheme(TopKA2A(0.05), PerTensor(), DEAR)",
    "Scheme(OkTopk(0.05), BySize(0.04, ends=0.02), DEAR)",
    "Scheme(OkTopk(0.05), PerTensor(), WFBP)",
    "Scheme(PartitionedTopK(0.05), BySize(0.04, ends=0.02), WFBP)",
    "Scheme(Dense(), BySize(0.04, ends=0.02), Schedule('step', every=2))",
    "Scheme(TopK(0.05), schedule=Schedule('step', every=4, delay=1, fragments=2))",
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*chain.from_iterable(layers))


def _trained(scheme: str) -> tuple[list[str], list[str]]:
    """Names in the order in which gradients got ready, and all that was asked for."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    sync = gradtide.replicate(net, optimizer, scheme)
    torch.manual_seed(sync.engine.transport.group.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.randn(8, WIDTH)).square().sum().backward()
        optimizer.step()
    sync.flush()
    buckets = sync._training.placement.buckets
    ready = sorted(
        chain.from_iterable(h.slots for h in buckets), key=lambda s: s.position
    )
    records = [f"{r.bucket}:{r.request}" for r in sync.engine.telemetry.records]
    sync.remove()
    return [slot.name for slot in ready], records


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[list[str], list[str]]]:
    found = run_ranks(SIZE, _all_trained)
    return found[0]


def _all_trained() -> dict[str, tuple[list[str], list[str]]]:
    return {scheme: _trained(scheme) for scheme in SCHEMES}


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES)
def test_requests_come_in_the_order_of_a_real_replica(
    scheme: str, trained: dict[str, tuple[list[str], list[str]]]
) -> None:
    ready, real = trained[scheme]
    numels = {name: p.numel() for name, p in model().named_parameters()}
    trace = StepTrace(
        "test",
        tuple(Unit(name, numels[name], 4, 1e-3, 2e-3, 0.0) for name in ready),
        optimizer=1e-3,
        forward_order=tuple(ready.index(name) for name in numels),
    )
    run = Run(trace, parse(scheme), Network.ideal(SIZE, 1, 1e8))
    run.step()
    before = len(run.actions.engine.telemetry.records)
    for _ in range(STEPS - 1):
        run.step()
    run.flush()
    virtual = [f"{r.bucket}:{r.request}" for r in run.actions.engine.telemetry.records]
    assert len(virtual) > 3 * before
    # The first steps of a replica are in the order of registration, and not deferred.
    tail = (STEPS - 2) * len(virtual) // STEPS
    assert virtual[-tail:] == real[-tail:]
