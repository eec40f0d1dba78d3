"""Hooks on gradients: behind the user's own, and lost by nobody; and torch.func."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Product
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import gradtide
from gradtide.core.torch_internals.autograd import after_accumulation

SCHEMES = ["wfbp", "dear", "topk(0.2)", "diloco(every=2)"]


def mlp(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))


def loss(model: Callable[..., Tensor], step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    dtype = next(model.parameters()).dtype if isinstance(model, nn.Module) else None
    return model(torch.randn(3, 6, dtype=dtype)).square().mean()


def values(model: nn.Module) -> list[float]:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat.tolist()


def train(
    scheme: str,
    between: Callable[[int, nn.Module, Any], Any] = lambda *_: None,
    begin: Callable[[nn.Module], Any] = lambda _: None,
    width: int = 16,
) -> list[float]:
    """Train, with something done before each step's backward; returns parameters."""
    model = mlp(width)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    net: Any = model
    if scheme == "ddp":
        net = nn.parallel.DistributedDataParallel(model)
        begin(model)
    else:
        sync = gradtide.replicate(model, opt, scheme, check_every=1)
        begin(model)
    for step in range(5):
        between(step, model, opt)
        loss(net, step).backward()
        opt.step()
        opt.zero_grad()
    if scheme != "ddp":
        sync.end_round()
        sync.remove()
    return values(model)


# - Hooks behind others ----------------------------------------------------------------


def test_a_hook_stays_behind_those_that_come_later() -> None:
    called: list[str] = []

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda _: called.append(name)

    def backward() -> list[str]:
        called.clear()
        (2 * p).sum().backward()
        return [*called]

    p = nn.Parameter(torch.ones(2))
    before = p.register_post_accumulate_grad_hook(note("before"))
    ours = after_accumulation(p, note("ours"))
    between = p.register_post_accumulate_grad_hook(note("between"))
    assert backward() == ["before", "between", "ours"]
    before.remove()
    p.register_post_accumulate_grad_hook(note("later"))
    assert backward() == ["between", "later", "ours"]
    between.remove()
    ours.remove()
    assert backward() == ["later"]
    again = after_accumulation(p, note("again"))
    p.register_post_accumulate_grad_hook(note("last"))
    assert backward() == ["later", "last", "again"]
    again.remove()
    assert backward() == ["later", "last"]
    assert not copy.deepcopy(p)._post_accumulate_grad_hooks


def edit(p: nn.Parameter) -> None:
    """What a user's hook may do: it clips, masks, scales, and makes anew."""
    assert p.grad is not None
    p.grad.clamp_(-0.01, 0.01).mul_(torch.arange(p.numel()).view(p.shape) % 3)
    if p.dim() == 1:
        p.grad = p.grad / 2


@pytest.mark.parametrize("width", [16, 12_000])  # the larger is taken at once
def test_a_users_hook_sees_what_it_sees_under_ddp(width: int) -> None:
    def register(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(edit)

    def run() -> None:
        expected = train("ddp", begin=register, width=width)
        for scheme in ("wfbp", "dear"):
            assert train(scheme, begin=register, width=width) == expected, scheme

    run_ranks(2, run)


# - Parameters that are swapped --------------------------------------------------------


def reload(model: nn.Module, _: object) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})


def cast(model: nn.Module, _: object) -> None:
    model.double().float()


def swap_one(model: Any, _: object) -> None:
    torch.utils.swap_tensors(model[2].bias, nn.Parameter(model[2].bias.data.clone()))


def reload_alone(model: nn.Module, _: object) -> None:
    if dist.get_rank() == 1:
        reload(model, None)


def at(when: int, change: Callable[..., Any]) -> Callable[..., Any]:
    """Make a change before a step, and the next one."""
    return lambda step, *a: change(*a) if step in (when, when + 1) else None


CHANGES = [reload, cast, swap_one, reload_alone]


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 3])
def test_hooks_follow_parameters_that_are_swapped(size: int, product: Product) -> None:
    every = product(SCHEMES, CHANGES, (1, 2, 3))
    cases = [(scheme, change) for scheme, change, p in every if p == size]

    def run() -> None:
        unchanged = {scheme: train(scheme) for scheme, _ in cases}
        for scheme, change in cases:
            torch.__future__.set_swap_module_params_on_conversion(True)
            found = train(scheme, at(2, change))
            torch.__future__.set_swap_module_params_on_conversion(False)
            if "topk" not in scheme:  # it drops the residual when states are loaded
                assert found == unchanged[scheme], (scheme, change)

    run_ranks(size, run)


def test_parameters_that_are_cast_or_replaced_are_named() -> None:
    def recast(model: Any, _: object) -> None:
        model.double()

    def head(model: Any, _: object) -> None:
        model[2] = nn.Linear(16, 2)

    def new_optimizer(model: Any, opt: Any) -> None:
        model[2] = nn.Linear(16, 2)
        opt.param_groups.clear()
        opt.add_param_group({"params": [*model.parameters()]})

    def assign(model: Any, _: object) -> None:
        state = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    remedies = r"replicate\(\) again|call sync\.refresh\(\)"

    def run() -> None:
        for scheme in SCHEMES:
            for change in (recast, head, new_optimizer, assign):
                for swap in (False, True)[: 2 - (change is assign)]:
                    torch.__future__.set_swap_module_params_on_conversion(swap)
                    with pytest.raises(RuntimeError, match=remedies):
                        train(scheme, at(2, change))

    def new_optimizer_alone() -> None:
        """The one that the replica knows makes no step any more."""
        model: Any = mlp()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        gradtide.replicate(model, opt, "wfbp")
        loss(model, 0).backward()
        opt.step()
        model[2] = nn.Linear(16, 2)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        with pytest.raises(RuntimeError, match=r"2.weight .* replaces another"):
            loss(model, 1).backward()  # the old one makes no step that could tell

    run_ranks(2, run)
    run_ranks(2, new_optimizer_alone)


# - Other uses of the model ------------------------------------------------------------


def look(model: nn.Module, by_grad: bool) -> None:
    """Log what torch.func tells of the model; and `by_grad`, torch.autograd.grad."""
    params = {k: p.detach() for k, p in model.named_parameters()}
    x, y = torch.randn(4, 6), torch.randn(4, 2)

    def one(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(model, params, (x[None],)) - y[None]).square().mean()

    each = vmap(grad(one), (None, 0, 0))(params, x, y)
    bias = {"2.bias": params["2.bias"]}
    curved = hessian(lambda b: one({**params, "2.bias": b}, x[0], y[0]))(bias["2.bias"])
    _, along = jvp(lambda p: one(p, x[0], y[0]), (params,), (params,))
    plain = vmap(lambda x: model(x))(x)
    inputs = vmap(grad(lambda x: model(x).sum()))(x)
    found = [*each.values(), curved, along, plain, inputs]
    if by_grad:
        found += torch.autograd.grad(model(x).sum(), [*model.parameters()])
        second = torch.autograd.functional.hessian
        found.append(second(lambda x: model(x).sum(), x[0]))
    assert all(value.isfinite().all() for value in found)
    assert each["0.weight"].shape == (4, 16, 6)


@pytest.mark.product
@pytest.mark.parametrize("scheme", [*SCHEMES, "dp_kfac"])
def test_one_rank_may_look_by_torch_func_at_any_time(scheme: str) -> None:
    def run() -> None:
        def watch(_: int, model: nn.Module, __: object) -> None:
            if dist.get_rank() == 1:
                with warnings.catch_warnings():  # of torch's own
                    warnings.simplefilter("ignore", DeprecationWarning)
                    warnings.simplefilter("ignore", FutureWarning)
                    look(model, by_grad="kfac" not in scheme)

        expected = train(scheme)
        assert train(scheme, watch) == expected

    run_ranks(2, run)


def test_buffers_are_sent_by_training_forwards_alone() -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = gradtide.replicate(model, opt, "dear")
        for step in range(3):
            if dist.get_rank() == 1:
                state = {k: v.detach() for k, v in model.state_dict().items()}
                x = torch.randn(4, 6)
                model[1].track_running_stats = False
                floats = {k: v for k, v in state.items() if v.is_floating_point()}
                grad(lambda s, x: functional_call(model, s, (x,)).sum())(floats, x)
                model[1].track_running_stats = True
                del state, floats
            loss(model, step).backward()
            opt.step()
            opt.zero_grad()
        sync.remove()

    run_ranks(2, run)
