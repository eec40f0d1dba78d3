"""replicate() against DistributedDataParallel, feature by feature and in products."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint

import gradtide
from gradtide.core.engine import Engine
from gradtide.core.ops import Broadcast
from gradtide.core.step import Stage
from gradtide.runtime.layout import buckets
from tests.conftest import Product
from tests.ranks import run_ranks

# The package's own attribute of this name is the function.
broadcast_module = importlib.import_module("gradtide.runtime.layout.broadcast")

SMALL = "fusion=BySize(0.004, 0.001, 1)"  # several buckets for a small model
SCHEMES = {
    name: f"Scheme(Dense(), {SMALL}, schedule={name})"
    for name in ("SEQUENTIAL", "WFBP", "DEAR")
}
DEAR = SCHEMES["DEAR"]


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def data(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank() if rank is None else rank
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 12, generator=rng), torch.randint(0, 4, (6,), generator=rng)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3
    )


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


def test_buckets_leave_in_the_order_in_which_they_get_full() -> None:
    def run() -> list[str]:
        model = plain()
        opt = sgd(model.parameters())
        sync = gradtide.replicate(model, opt, SCHEMES["WFBP"])
        for step in range(3):
            x, y = data(step)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        sync.remove()
        names = [record.bucket for record in sync.engine.telemetry.records]
        return [name for name in names if name.startswith("grad")][-3:]

    for names in run_ranks(2, run):
        assert names == sorted(names)
        assert len({*names}) == 3


def train(
    scheme: str | None,
    make: Callable[[], nn.Module] = plain,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    *,
    steps: int = 6,
    accumulate: int = 1,
    clip: float | None = None,
    schedule: bool = False,
    ddp_options: dict[str, Any] | None = None,
) -> list[Tensor]:
    """Parameters after some steps, under DDP (scheme None) or a scheme of ours."""
    torch.manual_seed(7)
    model = make()
    opt = optimizer(model.parameters())
    decay = torch.optim.lr_scheduler.ExponentialLR(opt, 0.7) if schedule else None
    sync: Any
    if scheme is None:
        sync = wrapped = DistributedDataParallel(model, **(ddp_options or {}))
    else:
        sync, wrapped = gradtide.replicate(model, opt, scheme), model
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with nullcontext() if last else sync.no_sync():
                x, y = data(step * accumulate + micro)
                cross_entropy(wrapped(x), y).backward()
        if clip is not None and scheme is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        elif clip is not None:
            sync.clip_grad_norm_(clip)
        opt.step()
        opt.zero_grad()
        if decay is not None:
            decay.step()
    if scheme is not None:
        sync.remove()
    return [p.detach().clone() for p in model.parameters()]


def same_as_ddp(
    scheme: str, theirs: list[Tensor] | None = None, **options: Any
) -> None:
    """Train as DDP does, which is asked for its results unless they are known."""
    ours, theirs = train(scheme, **options), theirs or train(None, **options)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=1e-6)
    agreed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(agreed, [p.tolist() for p in ours])
    assert all(other == agreed[0] for other in agreed), "ranks drifted apart"


@pytest.mark.product(each=6)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_product_of_features_equals_ddp(size: int, product: Product) -> None:
    axes = (sgd, adamw), (1, 3), (None, 0.3), (False, True)
    run_ranks(size, _product, product(*axes, other=size > 2))


def _product(cases: list[Any]) -> None:
    for optimizer, accumulate, clip, schedule in cases:
        options = {
            "optimizer": optimizer,
            "accumulate": accumulate,
            "clip": clip,
            "schedule": schedule,
        }
        results = [train(scheme, steps=4, **options) for scheme in SCHEMES.values()]
        # Norms of what is deferred are summed in another order.
        near = torch.equal if clip is None else partial(torch.allclose, rtol=1e-5)
        for other in results[1:]:
            assert all(map(near, results[0], other)), options
        same_as_ddp(DEAR, steps=4, **options)


# - Models that DDP users have ---------------------------------------------------------


class Branches(nn.Module):
    """Uses one branch on even ranks, both on none, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 32)
        self.even, self.odd, self.never = (nn.Linear(32, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        head = self.even if dist.get_rank() % 2 == 0 else self.odd
        out: Tensor = head(torch.relu(self.body(x)))
        return out


class Shared(nn.Module):
    """One weight in two modules, one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.twice, self.tied = (nn.Linear(12, 12) for _ in range(3))
        self.tied.weight = self.inner.weight
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.relu(self.inner(x)))
        out: Tensor = self.head(self.tied(torch.relu(self.twice(x))))
        return out


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b, self.c = (nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = checkpoint(lambda x: self.c(self.b(x)), x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


class Attention(nn.Module):
    """nn.MultiheadAttention never calls the forward of its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(12, 3, batch_first=True, bias=False)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        out: Tensor = self.head(self.attend(x, x, x, need_weights=False)[0][:, 0])
        return out


class Backwards(nn.Module):
    """Registered in the reverse order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.relu(layer(x))
        out: Tensor = self.head(x)
        return out


def frozen() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)  # type: ignore[operator, union-attr]
    return model


def images() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2, padding=1), nn.Flatten()
    )
    return nn.Sequential(model, nn.Linear(72, 4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "shared": (Shared, {}),
    "checkpointed": (lambda: Checkpointed(False), {}),
    "re-entrant": (lambda: Checkpointed(True), {}),
    "attention": (Attention, {}),
    "backwards": (Backwards, {}),
    "frozen": (frozen, {}),
    "channels-last": (images, {}),
    "unused": (Branches, {"find_unused_parameters": True}),
}


@pytest.mark.product(each=6)
@pytest.mark.parametrize(
    ("size", "large"),
    [(2, buckets.LARGE), (3, buckets.LARGE), (2, 1)],  # 1: all taken in at once
)
def test_models_that_ddp_users_have(size: int, large: int) -> None:
    run_ranks(size, _models, large)


def _models(large: int) -> None:
    buckets.LARGE = large  # type: ignore[attr-defined]  # in this rank's process only
    for name, (make, ddp_options) in MODELS.items():
        theirs = train(None, make, ddp_options=ddp_options)
        for label, scheme in SCHEMES.items():
            try:
                same_as_ddp(scheme, theirs, make=make)
            except AssertionError as error:
                raise AssertionError(f"{name} under {label}: {error}") from error


class Twice(nn.Module):
    """Re-entrant checkpoints run a backward of their own: each has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)  # type: ignore[no-untyped-call]
        return x


def test_a_gradient_whose_bucket_has_left_is_refused_by_name() -> None:
    def run() -> str:
        model = Twice()
        sync = gradtide.replicate(model, sgd(model.parameters()), SCHEMES["WFBP"])
        with pytest.raises(RuntimeError) as caught:
            model(data(0)[0]).sum().backward()
        assert sync is not None
        return str(caught.value)

    for told in run_ranks(2, run):
        assert "got a second gradient in one backward pass after its bucket" in told
        assert told.startswith("layer.")


def test_who_is_never_called_is_read_by_the_module_above_it() -> None:
    """So the update comes before a module runs, and not with what it reads first."""

    def run() -> bool:
        model = Attention()
        opt = sgd(model.parameters())
        sync = gradtide.replicate(model, opt, "dear(fusion=PerTensor())")
        for step in range(2):
            model(data(step)[0]).sum().backward()
            opt.step()
            opt.zero_grad()
        placement = sync._training.placement
        own = placement.places[model.attend.out_proj.weight].bucket
        found = own in placement.reads[model.attend]
        sync.remove()
        return found

    assert run_ranks(2, run) == [True, True]


def groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.SGD(
        [
            {"params": params[::2], "lr": 0.05, "weight_decay": 0.1},
            {"params": params[1::2], "lr": 0.2, "momentum": 0.5},
        ],
        lr=0.1,
    )


class Lion(torch.optim.Optimizer):
    """Of no library: has attributes of its own, and counts its steps in one."""

    def __init__(self, params: Any, lr: float, decoupled: bool = True) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})
        self.decoupled, self.steps = decoupled, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                if self.decoupled:
                    p.mul_(1 - group["lr"] * 0.1)
                p.sub_(mean.lerp(p.grad, 0.1).sign(), alpha=group["lr"] / self.steps)
                mean.lerp_(p.grad, 0.01)


class Holding(torch.optim.Optimizer):
    """Lets another optimizer step, and pulls what that made towards a mean."""

    def __init__(self, params: Any) -> None:
        self.base = torch.optim.AdamW(params, lr=0.01, amsgrad=True)
        super().__init__(self.base.param_groups, {"pull": 0.5})
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.state[p].setdefault("slow", p.clone())
                    p.copy_(slow.lerp_(p, group["pull"]))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "groups": groups,
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.005),
    "own attributes": lambda p: Lion(p, lr=0.01),
    "held": Holding,
}


def test_optimizers_and_groups_with_a_schedule() -> None:
    run_ranks(2, _optimizers)


def _optimizers() -> None:
    for optimizer in OPTIMIZERS.values():
        results = [
            train(scheme, optimizer=optimizer, schedule=True)
            for scheme in SCHEMES.values()
        ]
        for other in results[1:]:
            assert all(map(torch.equal, results[0], other)), optimizer
        same_as_ddp(DEAR, optimizer=optimizer, schedule=True)


def test_hooks_around_every_optimizers_step_run_once_a_step() -> None:
    run_ranks(2, _global_hooks)


def _global_hooks() -> None:
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    train(DEAR, steps=3)
    assert seen == 3 * ["before", "after"]
    for handle in handles:
        handle.remove()


def test_mixed_dtypes() -> None:
    run_ranks(2, _mixed)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(12, 12, dtype=torch.float64)
        self.narrow = nn.Linear(12, 12, dtype=torch.bfloat16)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(self.wide(x.double()).bfloat16())
        out: Tensor = self.head(x.float())
        return out


def _mixed() -> None:
    for scheme in SCHEMES.values():
        ours, theirs = train(scheme, Mixed, clip=0.5), train(None, Mixed, clip=0.5)
        for mine, other in zip(ours, theirs, strict=True):
            close = 2e-2 if mine.dtype == torch.bfloat16 else 1e-3
            torch.testing.assert_close(mine, other, rtol=close, atol=close)


# - The rest of a DDP user's habits ----------------------------------------------------


def test_gradients_are_in_place_after_backward() -> None:
    run_ranks(2, _gradients)


def _gradients() -> None:
    for scheme in ("sequential", "wfbp"):
        model = plain()
        opt = sgd(model.parameters())
        sync = gradtide.replicate(model, opt, scheme)
        reference = DistributedDataParallel(copy.deepcopy(model))
        for step in range(3):  # without zero_grad: several backward passes add up
            for module in (model, reference):
                x, y = data(step)
                cross_entropy(module(x), y).backward()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert p.grad is not None
                torch.testing.assert_close(p.grad, q.grad)
        opt.zero_grad(set_to_none=False)
        x, y = data(9)
        cross_entropy(model(x), y).backward()
        ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        reference.zero_grad()
        cross_entropy(reference(x), y).backward()
        for p, q in zip(ours, reference.parameters(), strict=True):
            torch.testing.assert_close(p, q.grad)
        sync.remove()


@pytest.mark.product
@pytest.mark.parametrize(
    ("to_none", "optimizer"), [(True, sgd), (False, sgd), (True, fused)]
)
def test_grad_scaler_skips_on_all_ranks(
    to_none: bool, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    for skipped, *params in run_ranks(2, _scaled, to_none, optimizer):
        assert skipped == [False, False, True, False, False]
        for name, other in zip(SCHEMES, params, strict=True):
            for mine, first in zip(other, params[0], strict=True):
                assert torch.tensor(mine).allclose(torch.tensor(first)), name


def _scaled(
    to_none: bool, optimizer: Callable[..., torch.optim.Optimizer]
) -> list[Any]:
    results: list[Any] = []
    for scheme in SCHEMES.values():
        torch.manual_seed(3)
        model = plain()
        opt = optimizer(model.parameters())
        sync = gradtide.replicate(model, opt, scheme)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        skipped = []
        for step in range(5):
            x, y = data(step)
            loss = cross_entropy(model(x), y)
            if step == 2 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(opt)
                sync.clip_grad_norm_(0.5)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            skipped.append(scaler.get_scale() < before)
            opt.zero_grad(set_to_none=to_none)
        sync.remove()
        results.append([p.tolist() for p in model.parameters()])
    return [skipped, *results]


def test_deferred_updates_become_visible() -> None:
    run_ranks(2, _visible)


def _visible() -> None:
    def build(scheme: str) -> tuple[nn.Module, torch.optim.Optimizer, gradtide.Replica]:
        torch.manual_seed(0)
        model = plain()
        opt = adamw(model.parameters())
        return model, opt, gradtide.replicate(model, opt, scheme)

    lazy, lazy_opt, lazy_sync = build(DEAR)
    eager, eager_opt, eager_sync = build(SCHEMES["WFBP"])

    def steps(count: int) -> None:
        for model, opt in ((lazy, lazy_opt), (eager, eager_opt)):
            model.train()
            for step in range(count):
                x, y = data(step)
                cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()

    def equal() -> bool:
        pairs = zip(lazy.parameters(), eager.parameters(), strict=True)
        return all(torch.equal(p, q) for p, q in pairs)

    steps(3)
    # Or nothing was deferred, and this test shows nothing.
    assert lazy_sync._training.placement.buckets[0].stage is Stage.DUE
    lazy_sync.flush()
    assert lazy_sync._training.placement.buckets[0].stage is Stage.IDLE
    assert equal()
    steps(2)
    x, _ = data(0)
    with torch.inference_mode():
        assert torch.equal(lazy.eval()(x), eager.eval()(x))
    steps(2)
    if dist.get_rank() == 0:  # a checkpoint is one rank's business
        theirs = eager.state_dict()
        ours = lazy.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        del ours  # or its tensors share the parameters' memory still
    steps(2)
    for mine, other in zip(
        lazy_opt.state_dict()["state"].values(),
        eager_opt.state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(mine[key], other[key]) for key in mine)
    steps(1)
    saved = copy.deepcopy(eager.state_dict())
    lazy.load_state_dict(saved)  # what was due must not be applied on top
    steps(0)
    assert equal()
    x, y = data(1)
    for model in (lazy, eager):
        cross_entropy(model.train()(x), y).backward()
    lazy_sync.gather_gradients()
    for p, q in zip(lazy.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    for opt in (lazy_opt, eager_opt):
        opt.step()
        opt.zero_grad()
    assert equal()
    lazy_sync.remove()
    eager_sync.remove()
    steps(1)  # local now, and the hooks are gone
    assert equal()


def test_parameters_and_buffers_start_as_rank_0s_and_buffers_follow() -> None:
    run_ranks(3, _buffers)


def _buffers() -> None:
    for scheme in SCHEMES.values():
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        reference = DistributedDataParallel(copy.deepcopy(model))
        opts = [sgd(m.parameters()) for m in (model, reference)]
        sync = gradtide.replicate(model, opts[0], scheme)
        for step in range(4):
            x, y = data(step)
            for module, opt in zip((model, reference), opts, strict=True):
                cross_entropy(module(x), y).backward()
                opt.step()
                opt.zero_grad()
        sync.flush()
        ours, theirs = model.state_dict(), reference.module.state_dict()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)
        sync.remove()


def test_buffers_may_stay_local() -> None:
    means = run_ranks(2, _local_buffers)
    assert means[0] != means[1]


def _local_buffers() -> list[float]:
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    sync = gradtide.replicate(model, sgd(model.parameters()), "wfbp", buffers="local")
    for step in range(2):
        x, y = data(step)
        cross_entropy(model(x), y).backward()
    sync.remove()
    return model[1].running_mean.tolist()  # type: ignore[no-any-return, union-attr, operator]


def test_a_parameter_that_no_rank_uses_is_left_alone() -> None:
    run_ranks(2, _left_alone)


def _left_alone() -> None:
    for scheme in SCHEMES.values():
        model = Branches()
        opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        sync = gradtide.replicate(model, opt, scheme)
        before = model.never.weight.detach().clone()
        for step in range(3):
            x, y = data(step)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        sync.remove()
        assert torch.equal(before, model.never.weight)  # no decay, no momentum
        assert model.never.weight not in opt.state


def test_a_subgroup_trains_beside_the_others() -> None:
    run_ranks(4, _subgroups)


def _subgroups() -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = pairs[dist.get_rank() % 2]
    model = plain()
    opt = sgd(model.parameters())
    sync = gradtide.replicate(model, opt, DEAR, process_group=group)
    for step in range(3):
        x, y = data(step)
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    sync.remove()
    weights: list[Any] = [None] * 4
    dist.all_gather_object(weights, model[0].weight.tolist())  # type: ignore[union-attr, operator, index]
    assert weights[0] == weights[2] != weights[1] == weights[3]


def test_the_module_can_be_copied_and_differentiated() -> None:
    run_ranks(2, _copied)


def _copied() -> None:
    model = plain()
    opt = sgd(model.parameters())
    sync = gradtide.replicate(model, opt, DEAR)
    average = copy.deepcopy(model).eval()
    for step in range(3):
        x, y = data(step)
        loss = cross_entropy(model(x), y)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        opt.step()
        opt.zero_grad()
        average(x)
    sync.remove()


@pytest.mark.product
@pytest.mark.parametrize("scheme", [DEAR, "topk(schedule='local')", "mpd_kfac", "auto"])
def test_a_whole_model_can_be_saved_and_is_a_plain_one_again(scheme: str) -> None:
    for saved, weights in run_ranks(2, _saved, scheme):
        assert b"gradtide" not in saved
        loaded = torch.load(io.BytesIO(saved), weights_only=False)
        assert [p.tolist() for p in loaded.parameters()] == weights
        opt = sgd(loaded.parameters())
        for model in (loaded, copy.deepcopy(loaded)):  # without a process group
            model(data(0, 0)[0]).sum().backward()
        opt.step()
        assert [p.tolist() for p in loaded.parameters()] != weights
        loaded.load_state_dict(loaded.state_dict())


def _saved(scheme: str) -> tuple[bytes, list[Any]]:
    model = plain()
    opt = sgd(model.parameters())
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(3):
        x, y = data(step)
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    file = io.BytesIO()
    torch.save(model, file)
    copied = copy.deepcopy(model)
    weights = [p.tolist() for p in model.parameters()]
    assert [p.tolist() for p in copied.parameters()] == weights
    copied(x).sum().backward()  # exchanges nothing
    if dist.get_rank() == 0:
        copied(x).sum().backward()
    sync.remove()
    return file.getvalue(), weights


def test_no_copy_has_half_of_a_deferred_update() -> None:
    run_ranks(2, _half_a_copy)


class Scaled(nn.Linear):
    """Has parameters of its own, and a module in it that has some, too."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(super().forward(x))
        return out


def _half_a_copy() -> None:
    model = Scaled()
    opt = sgd(model.parameters())
    sync = gradtide.replicate(model, opt, DEAR)
    for step in range(3):
        x, y = data(step)
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    copied = copy.deepcopy(model)
    assert all(map(torch.equal, model.parameters(), copied.parameters()))
    sync.remove()


@pytest.mark.parametrize("detach", [False, True])
def test_gathering_leaves_no_deferred_gradient_where_no_rank_has_a_gradient(
    detach: bool,
) -> None:
    run_ranks(2, _gathered, detach)


def _gathered(detach: bool) -> None:
    model = Branches()
    opt = sgd(model.parameters())
    sync = gradtide.replicate(model, opt, DEAR)
    for step in range(3):  # the first is recorded, and ordinary
        opt.zero_grad()
        x, y = data(step)
        cross_entropy(model(x), y).backward()
        if step == 2 and detach:
            sync.remove()
        else:
            sync.gather_gradients()
        for p in (*model.body.parameters(), *model.odd.parameters()):
            assert type(p.grad) is Tensor
        assert all(p.grad is None for p in model.never.parameters())
        before = model.body.weight.detach().clone()
        opt.step()
        assert not torch.equal(before, model.body.weight)
    if not detach:
        sync.remove()


def test_hooks_are_on_while_an_update_is_due_and_only_then() -> None:
    run_ranks(2, _hooks)


def _hooks() -> None:
    model = plain()
    opt = sgd(model.parameters())
    sync = gradtide.replicate(model, opt, DEAR)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]

    def hooked() -> list[bool]:
        return [bool(module._forward_pre_hooks) for module in linear]

    for step in range(3):
        x, y = data(step)
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert hooked() == [True] * 3
    h = linear[0](data(3)[0])  # by itself, past the model's own forward
    assert hooked()[0] is False
    assert hooked()[-1] is True
    linear[2](linear[1](h))
    assert hooked() == [False] * 3
    sync.remove()
    assert hooked() == [False] * 3


@pytest.mark.parametrize("fusion", ["PerTensor()", "BySize(10, 10, 1)"])
def test_any_module_called_by_itself_is_up_to_date(fusion: str) -> None:
    run_ranks(2, _by_itself, fusion)


def _by_itself(fusion: str) -> None:
    """In turns: whole, from behind, one module alone, one that was never called."""
    pairs = []
    for schedule in ("WFBP", "DEAR"):
        torch.manual_seed(5)
        model = Branches()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scheme = f"Scheme(Dense(), fusion={fusion}, schedule={schedule})"
        pairs.append((model, opt, gradtide.replicate(model, opt, scheme)))
    names: tuple[tuple[str, ...], ...]
    names = (("",), ("even", "body"), ("odd",), ("body", "", "body"), ("never",))
    for step in range(12):
        for model, opt, _ in pairs:
            x, y = data(step)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        for name in names[step % len(names)]:
            modules = [model.get_submodule(name) for model, _, _ in pairs]
            width = 32 if name in ("even", "odd", "never") else 12
            with torch.no_grad():
                eager, lazy = (module(torch.ones(2, width)) for module in modules)
            assert torch.equal(eager, lazy), f"{name or 'the model'} at step {step}"
    for _, _, sync in pairs:
        sync.remove()


def test_the_update_comes_before_hooks_that_read() -> None:
    run_ranks(2, _weight_norm)


def _weight_norm() -> None:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first = nn.utils.weight_norm(nn.Linear(12, 12))
        return nn.Sequential(first, nn.Linear(12, 4))

    same_as_ddp(DEAR, make=make)


def test_what_rank_0_sends_at_first_goes_in_short_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast_module, "MESSAGE_BYTES", 1000)
    run_ranks(2, _short_messages)


def _broadcast_bytes(model: nn.Module) -> tuple[list[int], gradtide.Replica]:
    """What rank 0 sends when the model is replicated, message by message."""
    sent: list[int] = []
    ask = Engine.ask

    def counting(engine: Engine, name: str, op: Any) -> Any:
        if isinstance(op, Broadcast):
            sent.append(op.tensor.nbytes)
        return ask(engine, name, op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "ask", counting)
        return sent, gradtide.replicate(model, sgd(model.parameters()), "wfbp")


def _short_messages() -> None:
    torch.manual_seed(dist.get_rank())
    model = plain().to(torch.float32)  # 1,700 parameters, one tensor over 1000 bytes
    sent, sync = _broadcast_bytes(model)
    total = sum(p.nbytes for p in model.parameters())
    assert sum(sent) == total
    assert max(sent) <= 1000
    assert len(sent) < 2 * total / 1000 + 2  # small ones travel together
    agreed: list[Any] = [None] * 2
    dist.all_gather_object(agreed, [p.tolist() for p in model.parameters()])
    assert agreed[0] == agreed[1]
    sync.remove()


def test_what_all_ranks_have_already_does_not_travel() -> None:
    run_ranks(3, _only_the_difference)


def _only_the_difference() -> None:
    torch.manual_seed(7)
    model = plain()
    model.register_buffer("noise", torch.tensor(float("nan")))
    sent, sync = _broadcast_bytes(model)
    assert sent == []
    sync.remove()
    changed = next(model.parameters())
    if dist.get_rank() == 2:
        with torch.no_grad():
            changed.view(-1)[0] += 1
    sent, sync = _broadcast_bytes(model)
    assert sent == [changed.nbytes]
    agreed: list[Any] = [None] * 3
    dist.all_gather_object(agreed, changed.tolist())
    assert agreed[0] == agreed[1] == agreed[2]
    sync.remove()


def test_what_was_chosen_is_logged_once() -> None:
    def work() -> list[str]:
        said: list[str] = []
        log, handler = logging.getLogger("gradtide"), logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        gradtide.replicate(model, optimizer, "dear", buffers="local").remove()
        return said

    first, second = run_ranks(2, work)
    assert len(first) == 2
    assert "Linear is replicated: Scheme(" in first[0]
    assert first[1].startswith("Linear is replicated:\n")  # bucket by bucket
    assert "2 ranks on 1 hosts, all ranks alike, by GlooTransport" in first[0]
    assert not second
