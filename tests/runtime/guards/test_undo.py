"""Parameters that are loaded in the middle of training, and the residual by then."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn

import gradtide
from gradtide.runtime import checkpoint

SMALL = "fusion=BySize(0.001, 0.0005, 1)"  # several buckets for a small model
SCHEMES = [
    f"Scheme(OkTopk(0.05), {SMALL})",
    f"Scheme(OkTopk(0.05), {SMALL}, schedule=DEAR)",
    f"Scheme(TopKA2A(0.05), {SMALL}, schedule=LOCAL)",
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))


def train(sync: gradtide.Replica, first: int, steps: int = 4) -> None:
    for step in range(first, first + steps):
        rng = torch.Generator().manual_seed(10 * step + dist.get_rank())
        sync.model(torch.randn(8, 12, generator=rng)).square().mean().backward()
        sync.optimizer.step()
        sync.optimizer.zero_grad()


def begin(scheme: str) -> gradtide.Replica:
    model = network()
    return gradtide.replicate(model, torch.optim.SGD(model.parameters(), 0.1), scheme)


def weights(sync: gradtide.Replica) -> list[float]:
    sync.flush()
    return nn.utils.parameters_to_vector(sync.model.parameters()).tolist()


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES, ids=["wfbp", "dear", "local"])
def test_what_is_undone_leaves_no_residual(scheme: str) -> None:
    def work() -> Any:
        found = []
        for again in (False, True):
            sync = begin(scheme)
            start = copy.deepcopy(sync.model.state_dict())
            if again:
                train(sync, 100)
                assert sync.metrics(residual=True)["residual_norm"] > 0
                sync.model.load_state_dict(start)
                # What the collective remembers of buckets is its own.
                for bucket in sync._training.placement.buckets:
                    bucket.payload.state.clear()
            train(sync, 0, 1)
            found.append(weights(sync))
            sync.remove()
        return found

    for alone, undone in run_ranks(2, work):
        assert undone == pytest.approx(alone, abs=1e-7)


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES, ids=["wfbp", "dear", "local"])
def test_an_average_that_is_loaded_and_put_back_changes_nothing(scheme: str) -> None:
    def work() -> Any:
        found = []
        for swap in (False, True):
            sync = begin(scheme)
            average = network().state_dict()
            train(sync, 0)
            if swap:
                own = copy.deepcopy(sync.model.state_dict())
                sync.model.load_state_dict(average)
                with torch.no_grad():
                    sync.model(torch.zeros(1, 12))
                sync.model.load_state_dict(own)
            train(sync, 4)
            found.append(weights(sync))
            sync.remove()
        return found

    for alone, swapped in run_ranks(2, work):
        assert swapped == alone


def test_a_residual_may_be_loaded_before_the_parameters() -> None:
    def work() -> Any:
        found = []
        sync = begin(SCHEMES[0])
        train(sync, 0)
        states = copy.deepcopy(sync.model.state_dict()), sync.state_dict()
        train(sync, 4)
        found.append(weights(sync))
        sync.remove()
        sync = begin(SCHEMES[0])
        train(sync, 50)  # on what there is, too
        sync.load_state_dict(states[1])
        sync.model.load_state_dict(states[0])
        train(sync, 4)
        return [*found, weights(sync)]

    for whole, resumed in run_ranks(2, work):
        assert resumed == whole


def corrected(schedule: str) -> str:
    return f"Scheme(MomentumCorrection(TopK(0.05, Exact())), {SMALL}{schedule})"


def with_momentum(scheme: str, optimizer: str = "sgd") -> gradtide.Replica:
    model = network()
    make: Any = {
        "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
        "adam": lambda ps: torch.optim.Adam(ps, 0.01, betas=(0.9, 0.99), eps=1.0),
    }[optimizer]
    return gradtide.replicate(model, make(model.parameters()), scheme)


@pytest.mark.product
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("schedule", ["", ", schedule=DEAR"], ids=["wfbp", "dear"])
def test_what_is_undone_leaves_no_momentum(schedule: str, optimizer: str) -> None:
    """Momentum correction knows the residual apart from gradients, and forgets both."""

    def work() -> Any:
        found = []
        for again in (False, True):
            sync = with_momentum(corrected(schedule), optimizer)
            start = copy.deepcopy(sync.model.state_dict())
            if again:
                train(sync, 100)
                assert sync.metrics(residual=True)["residual_norm"] > 0
                sync.model.load_state_dict(start)
                sync.optimizer.state.clear()
            train(sync, 0)
            found.append(weights(sync))
            sync.remove()
        return found

    for alone, undone in run_ranks(2, work):
        assert undone == alone


def still(sync: gradtide.Replica, steps: int) -> None:
    """Steps without gradient: what is left arrives."""
    for _ in range(steps):
        sum((p * 0).sum() for p in sync.model.parameters()).backward()  # type: ignore[union-attr]
        sync.optimizer.step()
        sync.optimizer.zero_grad()


@pytest.mark.product(each=6)
@pytest.mark.parametrize("way", ["adopted", "loaded"])
@pytest.mark.parametrize("levels", [1, 2])
def test_a_residual_gets_no_momentum_where_the_correction_begins(
    way: str, levels: int
) -> None:
    """Adopted, or loaded from the state of another number of ranks: it arrives once."""
    plain = f"Scheme(TopK(0.05, Exact()), {SMALL}, levels={levels})"

    def work() -> Any:
        sync = with_momentum(plain)
        train(sync, 0, 3)
        before, state = weights(sync), sync.state_dict()
        if way == "adopted":
            sync.adopt(corrected(f", levels={levels}"))
        else:
            # As if rank 0 alone had trained: others have nothing to take over.
            state = sync.engine.transport.gather_objects(state)[0]
            weights_then = copy.deepcopy(sync.model.state_dict())
            sync.remove()
            sync = with_momentum(corrected(f", levels={levels}"))
            vars(checkpoint)["_compare"] = lambda *_: None  # it was of all
            sync.load_state_dict({**state, "world_size": 1})
            sync.model.load_state_dict(weights_then)
        left = [x for p in sync.model.parameters() for x in residual(sync, p)]
        still(sync, 60)
        assert sync.metrics(residual=True)["residual_norm"] == 0
        moved = torch.tensor(before) - torch.tensor(weights(sync))
        return moved.tolist(), left

    found = run_ranks(2 * levels, work)
    lefts = torch.tensor([left for _, left in found])
    assert lefts.any(1).tolist() == [
        way == "adopted" or r == 0 for r in range(len(found))
    ]
    for moved, _ in found:
        assert moved == pytest.approx((0.1 * lefts.mean(0)).tolist(), abs=1e-6)


def residual(sync: gradtide.Replica, parameter: nn.Parameter) -> list[float]:
    place = sync._training.placement.places[parameter]
    if place.bucket.residual_empty:
        return [0.0] * parameter.numel()
    return place.slot.of(place.bucket.payload.flat).flatten().tolist()
