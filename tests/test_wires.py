"""Wires of few bits on real ranks: every schedule, accumulation and clipping; resuming;
gradients that are not numbers; warm-ups; another scheme; DDP's hook."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gradtide
from gradtide.core.payload import layers
from gradtide.fusion import BySize
from gradtide.integrations.ddp import comm_hook
from gradtide.planner.network import Network
from gradtide.planner.search import rank
from gradtide.planner.trace import StepTrace, Unit
from gradtide.scheme import Scheme, parse
from gradtide.wire import NARROW
from tests.conftest import Product
from tests.ranks import run_ranks
from tests.test_sparse import (
    OPTIMIZERS,
    batch,
    by_torch_save,
    network,
    poisoned,
    resumed,
    train,
    weights,
)

SCHEDULES = ("SEQUENTIAL", "WFBP", "DEAR")
SMALL = "BySize(0.004, ends=0.001)"  # two buckets: DEAR holds one


def dense(wire: str, schedule: str) -> str:
    return f"Scheme(Dense('{wire}'), {SMALL}, schedule={schedule})"


def sparse(kind: str, wire: str, schedule: str) -> str:
    return f"Scheme({kind}(0.1, wire='{wire}'), {SMALL}, schedule={schedule})"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_the_product_of_features(size: int, product: Product) -> None:
    """All ranks have the same bits, under every schedule; and near the exact ones."""
    cases = product(NARROW, ("sgd", "adamw"), (1, 2), other=size > 2)
    if size > 2 and len(cases) == 8:  # pairs: half of them is enough here
        cases = cases[::2]

    def run() -> list[Any]:
        found = []
        for wire, optimizer, accumulate in cases:
            schemes = [dense(wire, schedule) for schedule in SCHEDULES]
            found.append([train(s, optimizer, 5, accumulate).tolist() for s in schemes])
            clipped = [train(s, optimizer, 5, accumulate, 0.1) for s in schemes]
            torch.testing.assert_close(clipped[1], clipped[0])
            # Scaled at the cut, codes are as before, and scales rounded once more.
            torch.testing.assert_close(clipped[2], clipped[0], rtol=0.01, atol=2e-3)
        return found

    first, *others = run_ranks(size, run)
    assert all(other == first for other in others), "replicas differ"
    for sequential, wfbp, dear in first:
        assert sequential == wfbp == dear


def test_what_is_learned_is_near_the_exact() -> None:
    def run() -> dict[str, float]:
        exact = train("wfbp", "sgd", 12)
        start = weights(network())
        moved = float((exact - start).norm())
        return {
            wire: float((train(dense(wire, "WFBP"), "sgd", 12) - exact).norm()) / moved
            for wire in NARROW
        }

    found = run_ranks(2, run)[0]
    assert found["int8"] < 0.01
    assert found["e3m0"] < 0.1
    assert found["2bit"] < 0.3


def test_sparse_and_steps() -> None:
    """Sparse values and exchanged steps on every wire, with and without a warm-up."""
    texts = [sparse(kind, w, "WFBP") for kind in ("OkTopk", "TopKA2A") for w in NARROW]
    texts += [sparse("PartitionedTopK", wire, "LOCAL") for wire in NARROW]
    texts += [dense(wire, "LOCAL") for wire in NARROW]
    warm = "Warmup(TopK(0.1, wire='int8'), 3)"
    texts += [f"Scheme({warm}, {SMALL}, schedule=LOCAL)"]
    texts += ["topka2a(0.1, wire='e3m0', warmup=4, momentum_correction=True)"]

    def run() -> list[list[float]]:
        return [train(text, "adamw", 6).tolist() for text in texts]

    first, *others = run_ranks(3, run)
    assert all(other == first for other in others), "replicas differ"
    for text, found in zip(texts, first, strict=True):
        assert torch.tensor(found).isfinite().all(), text


def test_a_resumed_run_is_the_same_run() -> None:
    texts = [dense(wire, schedule) for wire in NARROW for schedule in SCHEDULES[1:]]
    texts += [sparse("OkTopk", "e3m0", "DEAR"), dense("int8", "LOCAL")]

    def run() -> list[bool]:
        return [resumed(text, by_torch_save) for text in texts]

    assert all(map(all, run_ranks(2, run)))


def test_nan_is_refused_by_name_or_skipped_everywhere() -> None:
    texts = [dense(wire, s) for wire in NARROW for s in ("WFBP", "DEAR", "LOCAL")]
    texts += [sparse("TopK", wire, "WFBP") for wire in NARROW]

    def run() -> list[Any]:
        return [[poisoned(text, scaled) for scaled in (True, False)] for text in texts]

    first, second = run_ranks(2, run)
    for text, one, two in zip(texts, first, second, strict=True):
        assert isinstance(one[0], list), text
        assert one == two, text
        assert torch.tensor(one[0]).isfinite().all(), text
        assert "2.weight" in one[1], text
        assert "rank 1" in one[1], text


def test_a_residual_is_delivered_by_another_scheme() -> None:
    """After the change to an exact wire, nothing is left."""

    def run() -> list[int]:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = gradtide.replicate(model, opt, "wfbp(wire='sign')")
        left = []
        for step, then in enumerate(("wfbp(wire='int8')", "wfbp", "wfbp")):
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            (own,) = (v for k, v in sync.state_dict().items() if k.startswith("rank"))
            kept = own["remainders"]
            left.append(sum(int(bool(value.any())) for value in kept.values()))
            sync.adopt(parse(then))
        sync.remove()
        return left

    assert run_ranks(2, run)[0] == [4, 4, 0]


def test_behind_ddps_hook() -> None:
    def run() -> list[float]:
        model = nn.parallel.DistributedDataParallel(network())
        model.register_comm_hook(*comm_hook("wfbp(wire='int8')"))
        opt = OPTIMIZERS["sgd"](model.parameters())
        for step in range(5):
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        exact = train("wfbp", "sgd", 5)
        torch.testing.assert_close(weights(model), exact, rtol=0.05, atol=2e-3)
        return weights(model).tolist()

    first, second = run_ranks(2, run)
    assert first == second


def test_the_last_dense_step_of_a_warm_up_is_exact() -> None:
    scheme = replace(parse("topk(0.1, wire='sign', warmup=4)"), fusion=BySize())

    def run() -> list[bool]:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = gradtide.replicate(model, opt, scheme)
        left = []
        for step in range(4):
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            (own,) = (v for k, v in sync.state_dict().items() if k.startswith("rank"))
            left.append(any(bool(v.any()) for v in own["remainders"].values()))
        sync.remove()
        return left

    steps = [each for each in layers(scheme.collective) if hasattr(each, "steps")]
    dense_steps = steps[0].steps  # type: ignore[attr-defined]
    expected = [step != dense_steps - 1 for step in range(4)]
    assert run_ranks(2, run)[0] == expected


def test_they_are_planned_by_their_bytes() -> None:
    units = tuple(Unit(f"w{i}", 250_000, 4, 0.01, 0.02, 0.001) for i in range(4))
    trace, net = StepTrace("made", units, 0.004), Network.ideal(8, 1, 1e8)
    asked = {wire: Scheme(gradtide.Dense(wire)) for wire in NARROW}  # type: ignore[arg-type]
    found = {c.name: c for c in rank(trace, net, asked, tune=False)}
    exact = found["wfbp"].prediction.sent_bytes
    for wire, bits in (
        ("int8", 8.125),
        ("e3m0", 4.125),
        ("2bit", 2.25),
        ("sign", 1.125),
    ):
        sent = found[wire].prediction.sent_bytes
        assert sent == pytest.approx(exact * bits / 32, rel=0.02)
        assert found[wire].kind == "lossy"  # what is rounded off is kept
        assert not found[wire].refused
