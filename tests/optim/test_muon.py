"""Muon by owners: torch's bits, divided work, checkpoints and refusals."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import gradtide
from gradtide.optim import DistributedMuon, matrices, muon

STEPS = 10
Make = Callable[..., Optimizer]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Tall, wide and square matrices of odd sizes, one of a single row, and vectors."""
    torch.manual_seed(0)
    sizes = [7, 33, 12, 12, 1]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1000 * step + rank)
    return torch.randn(40, 7).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
    return loss


class Both(Optimizer):
    """The usual container: Muon for matrices and AdamW for the rest."""

    def __init__(self, model: nn.Module, kind: Make, **options: Any) -> None:
        params = [*model.parameters()]
        two = [p for p in params if p.dim() == 2]
        first, rest = two[:2], two[2:]
        groups = [
            {"params": first},
            {"params": rest, "lr": 0.01, "nesterov": False, "ns_steps": 4},
        ]
        others = AdamW([p for p in params if p.dim() != 2], 3e-3)
        self.muon = kind(groups, 0.02, **{"weight_decay": 0.1} | options)
        self.inner = [self.muon, others]
        super().__init__(params, {})
        self.param_groups = [g for opt in self.inner for g in opt.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for opt in self.inner:
            opt.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alike(mine: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine.view(torch.uint8), o.view(torch.uint8)) for o in every)


def train(
    kind: Make,
    scheme: Any = "wfbp",
    dtype: torch.dtype = torch.float32,
    begin: Callable[[Both], object] = lambda _: None,
    **options: Any,
) -> tuple[Tensor, Both]:
    """With a scheduler, accumulation and clipping; some steps without a layer."""
    model, rank = network(dtype), dist.get_rank()
    outer: nn.Module = model
    wrapped = scheme in ("ddp", "install")  # torch's class or, by its name, ours
    if wrapped:
        with gradtide.install("wfbp") if scheme == "install" else nullcontext():
            outer = nn.parallel.DistributedDataParallel(
                model, find_unused_parameters=True
            )
    optimizer = Both(model, kind, **options)
    begin(optimizer)
    sync = None
    if not wrapped:
        sync = gradtide.replicate(model, optimizer, scheme)
    scheduler = LambdaLR(optimizer, lambda i: 1 / (1 + i / 20))
    for step in range(STEPS):
        optimizer.zero_grad()
        if sync is not None and step % 2:
            with sync.no_sync():
                loss_of(model, batch(step, rank + 50, dtype)).backward()
        if step == 4 and scheme != "ddp":  # the last layers are not used
            model[0](batch(step, rank, dtype)).square().mean().backward()
        else:
            loss_of(outer, batch(step, rank, dtype)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    if sync is not None:
        sync.remove()
    assert alike(flat(model))
    return flat(model), optimizer


def products() -> None:
    """torch's bits, whatever is chosen."""
    cases: list[tuple[Any, dict[str, Any]]] = [
        ("wfbp", {}),
        ("wfbp", {"dtype": torch.float64}),
        ("wfbp", {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5}),
        ("install", {}),
        ("ddp", {}),
        ("topka2a(0.2)", {}),
        ("dear", {}),
        ("dear", {"dtype": torch.float64}),
    ]
    few = cases[2:4] + cases[-2:]
    for scheme, options in cases if dist.get_world_size() == 2 else few:
        divided, optimizer = train(DistributedMuon, scheme, **options)
        plain, _ = train(Muon, scheme, **options)
        assert torch.equal(divided, plain), (scheme, options)
        held = sum(s["momentum_buffer"].numel() for s in optimizer.muon.state.values())
        total = torch.tensor(held)
        dist.all_reduce(total)
        assert total == 33 * 7 + 12 * 33 + 12 * 12 + 12  # each by one rank


@pytest.mark.product(each=6)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_product_of_features_has_torchs_bits(size: int) -> None:
    run_ranks(size, products)


# A sum in another order has other last bits, of which the bfloat16 inside Muon makes
# more: the one process adds up in the order of ranks, as small messages do.
def averaged(dtype: torch.dtype) -> list[float]:
    model, rank = network(dtype), dist.get_rank()
    optimizer = Both(model, DistributedMuon)
    sync = gradtide.replicate(model, optimizer, "wfbp")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step, rank, dtype)).backward()
        optimizer.step()
    sync.remove()
    found: list[float] = flat(model).tolist()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_equal_to_one_process_with_torchs_muon(size: int) -> None:
    def run() -> list[list[float]]:
        return [averaged(torch.float32), averaged(torch.float64)]

    found = run_ranks(size, run)[0]
    bounds = {torch.float32: 1e-5, torch.float64: 1e-12}
    for values, (dtype, bound) in zip(found, bounds.items(), strict=True):
        model = network(dtype)
        optimizer = Both(model, Muon)
        for step in range(STEPS):
            optimizer.zero_grad()
            for rank in range(size):
                loss_of(model, batch(step, rank, dtype)).backward()
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad / size
            optimizer.step()
        assert flat(model).tolist() == pytest.approx(values, abs=bound, rel=0)


def four() -> None:
    """More ranks than matrices of a group, two hosts, and who computes what."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
    counted: list[tuple[int, ...]] = []
    inner = matrices.orthogonalize

    def counting(update: Tensor, *rest: Any) -> Tensor:
        if update.numel() > 1:  # a trial
            counted.append(tuple(update.shape))
        return inner(update, *rest)

    matrices.orthogonalize = counting
    divided, optimizer = train(DistributedMuon, process_group=mesh)
    matrices.orthogonalize = inner
    # Four matrices, four ranks; three of them were not used in one step.
    assert len(optimizer.muon.state) == 1
    assert len({*counted}) == 1
    assert len(counted) == STEPS - (counted[0] != (33, 7))
    assert torch.equal(divided, train(Muon)[0])
    muon.MESSAGE = 1  # a message for each turn
    assert torch.equal(divided, train(DistributedMuon)[0])
    # One matrix alone.
    p = nn.Parameter(torch.ones(3, 5))
    alone = DistributedMuon([p], 0.1)
    p.grad = torch.arange(15.0).view(3, 5)
    alone.step()
    assert alike(p.detach())
    assert not torch.equal(p, torch.ones(3, 5))
    assert len(alone.state) == (dist.get_rank() == 0)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        alone.state_dict()


def test_ranks_without_matrices_and_hosts_of_several_ranks() -> None:
    run_ranks(4, four)


def nonfinite() -> None:
    for kind in (DistributedMuon, Muon):
        model = network()
        optimizer = Both(model, kind)
        sync = gradtide.replicate(model, optimizer, "wfbp")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = flat(model)
        for step in range(2):
            optimizer.zero_grad()
            x = batch(step, dist.get_rank())
            x[0, 0] = math.inf if dist.get_rank() == 1 else 0.0
            scaler.scale(loss_of(model, x)).backward()
            scaler.step(optimizer)  # skipped, by all
            scaler.update()
        assert torch.equal(flat(model), before)
        optimizer.step()  # not skipped
        assert not flat(model).isfinite().all()
        assert alike(flat(model))
        sync.remove()
    # A gradient on one rank alone, which nobody averaged: that of the owner counts.
    p = nn.Parameter(torch.ones(2, 2))
    alone = DistributedMuon([p], 0.1)
    for owner in (True, False):
        p.grad = torch.eye(2) if (dist.get_rank() == 0) is owner else None
        before = p.detach().clone()
        alone.step()
        assert alike(p.detach())
        assert torch.equal(p, before) is not owner


def test_what_is_not_finite_or_not_alike_is_so_on_every_rank() -> None:
    run_ranks(2, nonfinite)


def saved() -> bytes:
    """State after some steps, as a file; the same on every rank."""
    _, optimizer = train(DistributedMuon)
    ours = optimizer.muon
    assert isinstance(ours, DistributedMuon)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        ours.state_dict()
    ours.consolidate_state_dict()
    state = ours.state_dict()
    assert [*state["state"]] == [*range(4)]
    _, plain = train(Muon)
    for i, own in plain.muon.state_dict()["state"].items():
        assert torch.equal(own["momentum_buffer"], state["state"][i]["momentum_buffer"])
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def resumed(saved: bytes) -> None:
    """Going on with another number of ranks, and by torch's class."""

    def load(optimizer: Both) -> None:
        state = torch.load(io.BytesIO(saved))  # what is loaded is stepped in place
        optimizer.muon.load_state_dict(state)
        optimizer.param_groups[:2] = optimizer.muon.param_groups
        if isinstance(optimizer.muon, DistributedMuon):  # it can be saved again
            assert len(optimizer.muon.state_dict()["state"]) == 4

    divided, optimizer = train(DistributedMuon, begin=load)
    assert len(optimizer.muon.state) < 4
    assert torch.equal(divided, train(Muon, begin=load)[0])
    assert not torch.equal(divided, train(Muon)[0])


def test_a_state_is_by_parameter_and_loads_anywhere() -> None:
    files = run_ranks(2, saved)
    assert files[0] == files[1]
    run_ranks(3, resumed, files[0])


def later() -> None:
    """A group that is added later, and a matrix that is frozen later."""
    found, states = [], []
    for kind in (DistributedMuon, Muon):
        model = network()
        two = [p for p in model.parameters() if p.dim() == 2]
        optimizer = kind(two[:2], 0.02)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": two[2:], "lr": 0.1})
            two[1].requires_grad_(step < 4)
            model.zero_grad()
            loss_of(model, batch(step, 0)).backward()
            optimizer.step()
        if isinstance(optimizer, DistributedMuon):
            optimizer.consolidate_state_dict()
            assert optimizer.owners().keys() == {*two}
        found.append(flat(model))
        states.append(optimizer.state_dict()["state"])
    assert torch.equal(*found)
    for ours, plain in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(ours["momentum_buffer"], plain["momentum_buffer"])


def refusals() -> None:
    rank, model = dist.get_rank(), network()
    p = nn.Parameter(torch.ones(4, 4))
    for scheme in ("exdyna(0.1, schedule='local')",):
        for optimizer in (Both(model, DistributedMuon), DistributedMuon([p])):
            with pytest.raises(ValueError, match=r"inside its step.*'wfbp'"):
                gradtide.replicate(
                    model if isinstance(optimizer, Both) else nn.ParameterList([p]),
                    optimizer,
                    scheme,
                )
    sync = gradtide.replicate(model, Both(model, DistributedMuon), "wfbp")
    with pytest.raises(ValueError, match="use a plain optimizer"), sync.join():
        pass
    sync.remove()
    with pytest.raises(ValueError, match="2D"):
        DistributedMuon([nn.Parameter(torch.ones(2, 2, 3, 3))])
    with pytest.raises(ValueError, match="less than 100"):
        DistributedMuon([p], ns_steps=100)
    sparse = DistributedMuon([p])
    p.grad = torch.eye(4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):  # also who owns nothing
        sparse.step()
    with pytest.raises(ValueError, match="is complex"):
        DistributedMuon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    mesh = init_device_mesh("cpu", (2,))
    part = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="is sharded"):
        DistributedMuon([part])
    # What one rank alone has otherwise is told on both.
    with pytest.raises(ValueError, match="parameter 0 of group 0 differs"):
        DistributedMuon([nn.Parameter(torch.ones(3 + rank, 4))])
    with pytest.raises(ValueError, match="group 0 differs"):
        DistributedMuon([p], 0.1 * (1 + rank))
    with pytest.raises(ValueError, match="earning rate"):
        DistributedMuon([p], -1.0 * rank)


def test_what_comes_later_and_what_is_refused() -> None:
    def run() -> None:
        later()
        refusals()

    run_ranks(2, run)


def test_it_needs_other_ranks_to_be_reachable() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        DistributedMuon([nn.Parameter(torch.ones(2, 2))])
