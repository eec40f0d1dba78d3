"""A step that is deferred: whoever edits the optimizer's state meanwhile is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide.runtime.optimizer.deferred_step import DeferredStep

Optimizer = torch.optim.Optimizer


def reset(optimizer: Optimizer) -> None:
    for own in optimizer.state.values():
        own["exp_avg"].zero_()


def replace(optimizer: Optimizer) -> None:
    for own in optimizer.state.values():
        own["exp_avg_sq"] = torch.zeros_like(own["exp_avg_sq"])


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def one(optimizer: Optimizer) -> None:
    """Of one neuron alone, in one layer."""
    with torch.no_grad():
        next(iter(optimizer.state.values()))["exp_avg_sq"][0] = 0.0


def read(optimizer: Optimizer) -> None:
    [float(own["exp_avg"].sum()) for own in optimizer.state.values()]


EDITS = [reset, replace, clear, one]


def trained(
    scheme: str, edit: Callable[[Optimizer], None], flushes: bool
) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sync = gradtide.replicate(model, optimizer, scheme)
    rank = torch.distributed.get_rank()
    for step in range(6):
        seed = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(3, 4, generator=seed)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            if flushes:
                sync.flush()
            edit(optimizer)
    sync.flush()
    found = [x for p in model.parameters() for x in p.flatten().tolist()]
    sync.remove()
    return found


@pytest.mark.product
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_before_the_update_is_refused_and_behind_a_flush_it_counts(
    edit: Callable[[Optimizer], None],
) -> None:
    def work() -> None:
        for scheme in ("dear", "topka2a(0.3, schedule='dear')"):
            with pytest.raises(RuntimeError, match=r"state of Adam.*sync\.flush\(\)"):
                trained(scheme, edit, flushes=False)
        expected = trained("wfbp", edit, flushes=False)
        assert trained("dear", edit, flushes=True) == expected
        assert trained("dear", read, False) == trained("wfbp", read, False)

    run_ranks(2, work)


def test_a_mark_lasts_until_something_is_applied() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0, momentum=0.5)

    def backward(*some: Tensor) -> None:
        for p in some:
            p.grad = torch.ones(3)

    backward(*params)
    optimizer.step()
    backward(*params)
    step: Any = DeferredStep(optimizer)
    step.apply(params[:1], True)  # what nobody watches is applied at once
    step.mark({*map(id, params)})
    step.apply(params[1:], True)
    # What it did itself was no edit; from now on the state is the program's.
    optimizer.state[params[0]]["momentum_buffer"].zero_()
    step.apply(params[1:], True)
    step.mark({*map(id, params)})
    optimizer.state[params[0]]["momentum_buffer"].add_(1.0)
    with pytest.raises(RuntimeError, match="was changed after"):
        step.apply(params[1:], True)
