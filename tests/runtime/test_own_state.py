"""After a scheme that exchanges steps, an optimizer can be used by any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide

BEFORE = ["topka2a(0.1, schedule='local')", "diloco(every=2)"]
AFTER = ["wfbp", "dear", "topka2a(0.1, schedule='local', warmup=6)", "diloco(every=2)"]


@pytest.mark.product(each=6)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("before", BEFORE)
def test_ranks_go_on_alike_after_replicating_again(before: str, wrapped: bool) -> None:
    run_ranks(2, _again, before, wrapped)


def _again(before: str, wrapped: bool) -> None:
    for after in AFTER:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1 + dist.get_rank())
        train(model, optimizer, before, wrapped)
        assert len(unlike(moments(optimizer))) > 0
        train(model, optimizer, after, wrapped)
        assert not unlike([*model.parameters()]), after
        if after in ("wfbp", "dear"):
            assert not unlike(moments(optimizer)), after


@pytest.mark.parametrize("how", ["attach", "join"])
def test_ranks_go_on_alike_where_the_optimizer_is_attached_later(how: str) -> None:
    run_ranks(2, _attached, how)


def _attached(how: str) -> None:
    for after in ("wfbp", "dear"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1 + dist.get_rank())
        train(model, optimizer, BEFORE[0], wrapped=False)
        assert len(unlike(moments(optimizer))) > 0
        wrapped = gradtide.DistributedDataParallel(model, scheme=after)
        if how == "attach":
            wrapped.attach(optimizer)
        with wrapped.join(enable=how == "join"):
            for _ in range(3):
                wrapped(torch.randn(8, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        wrapped.replica.flush()
        assert not unlike([*model.parameters(), *moments(optimizer)]), after
        wrapped.replica.remove()


def test_a_state_that_cannot_be_sent_is_told_on_every_rank() -> None:
    run_ranks(2, _unsent)


def _unsent() -> None:
    model = nn.Linear(6, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, "topka2a(0.1, schedule='local')", wrapped=False)
    optimizer.state[model.weight]["made by"] = lambda: None
    with pytest.raises(RuntimeError, match="rank 0 cannot send the optimizer's state"):
        gradtide.replicate(model, optimizer, "wfbp")


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheme: str, wrapped: bool
) -> None:
    if wrapped:
        forward: nn.Module = gradtide.DistributedDataParallel(model, scheme=scheme)
        sync = forward.replica
    else:
        forward, sync = model, gradtide.replicate(model, optimizer, scheme)
    for _ in range(4):
        forward(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.remove()


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [entry for of_one in optimizer.state.values() for entry in of_one.values()]


def unlike(tensors: list[Tensor]) -> list[Tensor]:
    """Those of which ranks have other bits."""
    found = []
    for tensor in tensors:
        told = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(told, tensor.detach())
        found += [] if torch.equal(*told) else [tensor]
    return found
