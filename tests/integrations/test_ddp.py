"""The communication hook gives DDP the numbers that `replicate` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradtide
from gradtide.integrations.ddp import comm_hook

STEPS = 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))


def batch(step: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 20, generator=rng)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    module: nn.Module, model: nn.Module, steps: range = range(STEPS)
) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        module(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def hooked(scheme: str, **options: Any) -> Tensor:
    model = network()
    module = DistributedDataParallel(model, **options)
    module.register_comm_hook(*comm_hook(scheme))
    train(module, model)
    return weights(model)


def replicated(scheme: str) -> Tensor:
    model = network()
    sync = gradtide.replicate(
        model, torch.optim.SGD(model.parameters(), lr=0.1), scheme
    )
    train(model, model)
    sync.remove()
    return weights(model)


def plain() -> Tensor:
    model = network()
    train(DistributedDataParallel(model), model)
    return weights(model)


def on_ranks(*works: Callable[[], Any], size: int = 2) -> list[list[Tensor]]:
    """What each of `works` returns, by rank (processes cannot hand over tensors)."""

    def run() -> list[Any]:
        return [work().tolist() for work in works]

    return [list(map(torch.tensor, rank)) for rank in run_ranks(size, run)]


@pytest.mark.parametrize("views", [False, True])
def test_dense_equals_ddp(views: bool) -> None:
    ranks = on_ranks(plain, lambda: hooked("wfbp", gradient_as_bucket_view=views))
    for by_ddp, by_hook in ranks:
        torch.testing.assert_close(by_hook, by_ddp, rtol=1e-6, atol=1e-7)


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["TopK(0.05)", "GTopK(0.05)"])
@pytest.mark.parametrize("size", [2, 3])
def test_equals_replicate(scheme: str, size: int) -> None:
    ranks = on_ranks(lambda: replicated(scheme), lambda: hooked(scheme), size=size)
    for by_replicate, by_hook in ranks:
        assert torch.equal(by_hook, by_replicate)
        assert torch.equal(by_hook, ranks[0][1])


def rebuilt() -> Tensor:
    """What was left behind and delivered, over a change of DDP's buckets."""
    model = network()
    # Small buckets: the first iteration cuts otherwise than all later ones.
    module = DistributedDataParallel(model, bucket_cap_mb=0.001)
    state, hook = comm_hook("TopK(0.05)")
    module.register_comm_hook(state, hook)
    total = torch.zeros_like(weights(model))
    delivered = torch.zeros_like(total)
    for step in range(4):
        reference = network()
        reference(batch(step)).square().mean().backward()
        total += torch.cat([p.grad.flatten() for p in reference.parameters()])  # type: ignore[union-attr]
        loss = module(batch(step)).square().mean()
        loss.backward()
        delivered += torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
        model.zero_grad()
    left = state.remainders()
    remainder = torch.cat(
        [left.get(p, torch.zeros_like(p)).flatten() for p in model.parameters()]
    )
    return torch.stack([total - remainder, delivered])


def test_nothing_is_lost_when_ddp_rebuilds_its_buckets() -> None:
    [first], [second] = on_ranks(rebuilt)
    torch.testing.assert_close(first[0] + second[0], 2 * first[1])


def accumulated(scheme: str) -> Tensor:
    model = network()
    module = DistributedDataParallel(model)
    module.register_comm_hook(*comm_hook(scheme))
    with module.no_sync():
        module(batch(0)).square().mean().backward()
    module(batch(1)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]


def test_no_sync_accumulates() -> None:
    def reference() -> Tensor:
        model = network()
        for step in range(2):
            model(batch(step)).square().mean().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    for expected, gradient in on_ranks(reference, lambda: accumulated("wfbp")):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("scheme", ["wfbp", "TopK(0.05)"])
def test_ranks_may_run_out_of_data(scheme: str) -> None:
    def uneven() -> Tensor:
        model = network()
        module = DistributedDataParallel(model)
        module.register_comm_hook(*comm_hook(scheme))
        with module.join():
            train(module, model, range(3 + 2 * dist.get_rank()))
        return weights(model)

    [first], [second] = on_ranks(uneven)
    assert torch.equal(first, second)


@pytest.mark.parametrize("scheme", ["dear", "auto", "spd_kfac"])
def test_what_a_hook_cannot_do_is_refused(scheme: str) -> None:
    def refused() -> str:
        with pytest.raises(ValueError, match="hook") as caught:
            comm_hook(scheme)
        return str(caught.value)

    assert all("gradtide.replicate" in text for text in run_ranks(2, refused))


def test_a_remainder_is_saved_and_loaded() -> None:
    def resumed() -> bool:
        model = network()
        module = DistributedDataParallel(model)
        state, hook = comm_hook("TopK(0.05)")
        module.register_comm_hook(state, hook)
        train(module, model, range(2))
        saved = state.state_dict(model)
        fresh, _ = comm_hook("TopK(0.05)")
        fresh.load_state_dict(model, saved)
        before, after = state.remainders(), fresh.remainders()
        with pytest.raises(ValueError, match="every rank saves its own"):
            fresh.load_state_dict(model, {"rank9": {}})
        return before.keys() == after.keys() and all(
            torch.equal(before[p], after[p]) for p in before
        )

    assert all(run_ranks(2, resumed))
