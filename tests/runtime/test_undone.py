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
                for bucket in sync._training.buckets:
                    bucket.payload.state.clear()
            train(sync, 0, 1)
            found.append(weights(sync))
            sync.remove()
        return found

    for alone, undone in run_ranks(2, work):
        assert undone == pytest.approx(alone, abs=1e-7)


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
