"""Steps in the place of gradients: what travels, where the module stands meanwhile, and
the product of collective, optimizer, accumulation and clipping on real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Product
from tests.ranks import run_ranks
from tests.test_sparse import (
    LOW_RANK,
    OPTIMIZERS,
    RECOMMENDED,
    SPARSE,
    batch,
    by_torch_save,
    named,
    network,
    resumed,
    train,
    weights,
)
from torch import Tensor, nn

import gradtide
from gradtide.integrations.ddp import comm_hook
from gradtide.runtime.guards.nonfinite import not_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_first_gradient_that_isnot_finite_is_named(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    grads = {"a": torch.full((3, 5), largest, dtype=dtype), "b": torch.ones(2)}
    assert not_finite({}) is None
    assert not_finite(grads) is None  # though its norm is infinite
    for value in (math.inf, -math.inf, math.nan):
        for name in ("b", "a"):
            damaged = {key: grad.clone() for key, grad in grads.items()}
            damaged[name].view(-1)[1] = value
            assert not_finite(damaged) == name


def replica(
    scheme: str, optimizer: str = "sgd"
) -> tuple[nn.Module, torch.optim.Optimizer, gradtide.Replica]:
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters())
    return model, opt, gradtide.replicate(model, opt, scheme)


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


def undelivered(sync: gradtide.Replica) -> Tensor:
    """Of this rank, per parameter of the model, in its order."""
    left = sync.state_dict()[f"rank{dist.get_rank()}"]["remainders"]
    return torch.cat([left[n].flatten() for n, _ in sync.model.named_parameters()])


def over_ranks(own: Tensor) -> Tensor:
    total = own.clone()
    dist.all_reduce(total)
    return total


# - What travels -----------------------------------------------------------------------


@pytest.mark.product(each=6)
@pytest.mark.parametrize("collective", [*SPARSE, "PowerSGD"])
def test_nothing_of_a_step_is_lost(collective: str) -> None:
    def run(optimizer: str, gain: float) -> None:
        model = network()
        opt = OPTIMIZERS[optimizer](model.parameters())
        seen: list[Tensor] = []  # before and after each of the optimizer's own steps
        opt.register_step_pre_hook(lambda *_: seen.append(weights(model)))
        opt.register_step_post_hook(lambda *_: seen.append(weights(model)))
        sync = gradtide.replicate(model, opt, named(collective, 0.1, "LOCAL"))
        shared, left = weights(model), torch.zeros_like(weights(model))
        for step in range(5):
            backward(model, step)
            opt.step()
            opt.zero_grad()
            before, after = seen[-2:]
            assert torch.equal(before, shared)
            delivered, now = 3 * (weights(model) - shared), undelivered(sync)
            torch.testing.assert_close(
                delivered + over_ranks(now - left),
                over_ranks(gain * (after - before)),
                rtol=1e-4,
                atol=1e-6,
            )
            shared, left = weights(model), now
        assert left.any()
        sync.remove()

    def both() -> None:
        run("sgd", 1.0)
        run("adamw", math.sqrt(3))

    run_ranks(3, both)


@pytest.mark.parametrize(("momentum", "ahead"), [(0.0, 0.0), (0.5, 0.25), (0.8, 1.0)])
def test_some_of_what_momentum_will_do_is_sent_ahead(
    momentum: float, ahead: float
) -> None:
    slopes = torch.arange(1.0, 401.0)

    def run() -> None:
        weight = nn.Parameter(torch.zeros(400))
        opt = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
        model = nn.ParameterDict({"weight": weight})
        sync = gradtide.replicate(model, opt, named("TopK", 0.1, "LOCAL"))
        (slopes * weight).sum().backward()
        opt.step()
        left = undelivered(sync)
        torch.testing.assert_close(weight[360:], -slopes[360:] * (1 + ahead))
        torch.testing.assert_close(left[360:], slopes[360:] * ahead)
        torch.testing.assert_close(left[:360], -slopes[:360])
        sync.remove()

    run_ranks(2, run)


def test_steps_count_by_the_gain_that_is_asked_for() -> None:
    def run() -> list[float]:
        found = []
        for gain in (1.0, 0.5):
            weight = nn.Parameter(torch.zeros(8))
            opt = torch.optim.Adam([weight], lr=1.0)
            scheme = (
                f"Scheme(Dense(), schedule=Schedule('step', gain={gain}, noise=True))"
            )
            sync = gradtide.replicate(nn.ParameterList([weight]), opt, scheme)
            weight.sum().backward()
            opt.step()
            sync.remove()
            found.append(weight[0].item())
        return found

    for found in run_ranks(2, run):
        assert found == pytest.approx([-math.sqrt(2), -math.sqrt(0.5)])


def test_a_dense_exchange_is_the_mean_of_what_each_rank_would_have_done() -> None:
    def run() -> None:
        model, opt, sync = replica("Scheme(Dense(), schedule=LOCAL)")
        twin = network()
        alone = OPTIMIZERS["sgd"](twin.parameters())
        for step in range(4):
            backward(model, step)
            backward(twin, step)
            for some in (opt, alone):
                some.step()
                some.zero_grad()
            for p in twin.parameters():
                p.data.copy_(over_ranks(p.data) / 2)
            torch.testing.assert_close(weights(model), weights(twin))
        sync.remove()

    run_ranks(2, run)


@pytest.mark.product
@pytest.mark.parametrize("collective", RECOMMENDED + LOW_RANK)
def test_the_product_of_features(collective: str, product: Product) -> None:
    combined = product(OPTIMIZERS, (1, 2), (None, 0.1))
    start = weights(network())

    def run() -> list[Any]:
        scheme = named(collective, 0.1, "LOCAL")
        return [train(scheme, name, 4, *case).tolist() for name, *case in combined]

    ranks = run_ranks(2, run)
    for case, *trained in zip(combined, *ranks, strict=True):
        assert trained[0] == trained[1], f"replicas differ: {case}"
        assert (torch.tensor(trained[0]) != start).any(), case


RUN = 128  # who chooses, chooses rows of as many at most


class Lopsided(nn.Module):
    """Half of the gradients are a thousandth of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8 * RUN))

    def forward(self) -> Tensor:
        slopes = torch.linspace(1, 2, 8 * RUN)
        slopes.view(-1, 2, RUN)[:, 1] /= 1000
        return (slopes * self.weight).sum()


@pytest.mark.product
@pytest.mark.parametrize("collective", SPARSE)
def test_of_steps_alike_the_steepest_travel(collective: str) -> None:
    def run() -> list[int]:
        model = Lopsided()
        opt = torch.optim.Adam(model.parameters())
        scheme = f"Scheme({collective}(0.1), schedule=LOCAL)"
        sync = gradtide.replicate(model, opt, scheme)
        model().backward()
        opt.step()
        sync.remove()
        return model.weight.view(-1, 2, RUN).count_nonzero((0, 2)).tolist()

    for steep, slight in run_ranks(2, run):
        assert steep
        assert not slight


def test_what_the_mean_of_gradients_opposes_stays_longer() -> None:
    slopes = torch.tensor([10.0, 1.0]).repeat(200)
    turned = torch.tensor([-10.0, 1.0]).repeat(200)

    def run() -> list[int]:
        weight = nn.Parameter(torch.zeros(400))
        model = nn.ParameterList([weight])
        opt = torch.optim.Adam([weight], betas=(0.0, 0.999))  # steps are as long
        sync = gradtide.replicate(model, opt, named("TopK", 0.05, "LOCAL"))
        for slope in (*[slopes] * 4, turned):
            before = weight.detach().clone()
            (slope * weight).sum().backward()
            opt.step()
            opt.zero_grad()
        sync.remove()
        moved = weight.detach() != before
        return [int(moved[i::2].count_nonzero()) for i in range(2)]

    # Three steps to go squared, ten times as steep, but uphill; and five steps to go.
    for opposed, due in run_ranks(2, run):
        assert not opposed
        assert due


def test_up_one_hill_is_down_the_other() -> None:
    def run() -> list[list[float]]:
        both = []
        for up in (False, True):
            model = network()
            opt = OPTIMIZERS["adamw"](model.parameters())
            opt.param_groups[0]["maximize"] = up
            sync = gradtide.replicate(model, opt, named("TopK", 0.1, "LOCAL"))
            for step in range(6):
                loss = model(batch(step)).square().mean()
                (-loss if up else loss).backward()
                opt.step()
                opt.zero_grad()
            sync.remove()
            both.append(weights(model).tolist())
        return both

    for down, up in run_ranks(2, run):
        assert down == up


def test_alone_it_is_the_optimizer() -> None:
    schemes = (named("TopK", 0.1, "LOCAL"), "wfbp")
    ((one, other),) = run_ranks(
        1, lambda: [train(s, "adamw").tolist() for s in schemes]
    )
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


# - Where the module stands ------------------------------------------------------------


def test_all_ranks_have_the_same_at_all_times() -> None:
    def run() -> list[list[float]]:
        model, opt, sync = replica(named("TopK", 0.1, "LOCAL"), "adamw")
        seen = []
        for step in range(3):
            backward(model, step)
            seen.append(weights(model).tolist())
            opt.step()
            opt.zero_grad()
            seen.append(weights(model).tolist())
        assert undelivered(sync).any()
        sync.remove()
        assert seen[-1] == weights(model).tolist()
        return seen

    first, second = run_ranks(2, run)
    assert first == second


def test_one_rank_may_differentiate_by_itself() -> None:
    def run() -> list[float]:
        model, opt, sync = replica(named("TopK", 0.1, "LOCAL"))
        for step in range(3):
            if dist.get_rank() == 0:
                torch.autograd.grad(model(batch(step)).sum(), list(model.parameters()))
            backward(model, step)
            opt.step()
            opt.zero_grad()
        sync.remove()
        return weights(model).tolist()  # type: ignore[no-any-return]

    first, second = run_ranks(2, run)
    assert first == second


def test_what_the_user_changes_between_steps_stays() -> None:
    def run() -> list[float]:
        model, opt, sync = replica(named("TopK", 0.1, "LOCAL"))
        for step in range(3):
            backward(model, step)
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                model[0].weight[0] = 7.0  # type: ignore[index]
        sync.adopt(named("OkTopk", 0.1, "LOCAL"))
        left = undelivered(sync)
        assert left.any()
        opt.step()  # without a forward: delivers of what was left
        assert (model[0].weight[0] - 7.0).abs().max() < 0.01  # type: ignore[index]
        return weights(model).tolist()  # type: ignore[no-any-return]

    first, second = run_ranks(2, run)
    assert first == second


@pytest.mark.parametrize("keep", [False, True])
def test_dense_steps_of_a_warm_up_are_those_of_averaged_gradients(keep: bool) -> None:
    """And then steps travel; whether zero_grad() keeps its tensors is of no concern."""
    cut = "BySize(0.004, ends=0.001)"

    def run() -> list[list[list[float]]]:
        trained = []
        for scheme in (f"Scheme(Warmup(TopK(0.1), 3), {cut}, LOCAL)", "wfbp"):
            model, opt, sync = replica(scheme, "adamw")
            steps = []
            for step in range(6):
                backward(model, step)
                sync.clip_grad_norm_(0.1)
                opt.step()
                opt.zero_grad(set_to_none=not keep)
                steps.append(weights(model).tolist())
            assert scheme == "wfbp" or undelivered(sync).any()
            sync.remove()
            trained.append(steps)
        return trained

    ranks = run_ranks(2, run)
    assert ranks[0] == ranks[1]
    local, averaged = (torch.tensor(steps) for steps in ranks[0])
    torch.testing.assert_close(local[:3], averaged[:3])
    assert (local[3] != averaged[3]).sum() > 0.5 * local.shape[1]


def test_when_the_warm_up_ends_the_optimizer_expects_noisier_gradients() -> None:
    def run() -> list[float]:
        scheme = "Scheme(Warmup(TopK(0.1), 2), schedule=LOCAL)"
        model, opt, sync = replica(scheme, "adamw")
        squares = lambda: opt.state[model[0].weight]["exp_avg_sq"].sum().item()  # noqa: E731
        before: list[float] = []  # when a step begins
        opt.register_step_pre_hook(lambda *_: before.append(squares() if step else 0.0))
        after, factors = 0.0, []
        for step in range(4):
            backward(model, step)
            opt.step()
            opt.zero_grad()
            factors.append(before[-1] / after if after else 1.0)
            after = squares()
        sync.remove()
        return factors

    for factors in run_ranks(3, run):
        assert factors == pytest.approx([1.0, 1.0, 3.0, 1.0])


def test_a_run_resumed_in_its_warm_up_is_the_same_run() -> None:
    for steps in (3, 4, 6):  # stopped after four
        scheme = f"Scheme(Warmup(TopK(0.05), {steps}), schedule=LOCAL)"
        assert all(run_ranks(2, lambda s=scheme: resumed(s, by_torch_save)))


@pytest.mark.product
@pytest.mark.parametrize(
    "collective", ["TopK", "OkTopk", "PartitionedTopK", "PowerSGD"]
)
def test_a_resumed_run_is_the_same_run(collective: str) -> None:
    scheme = named(collective, 0.05, "LOCAL")
    assert all(run_ranks(2, lambda: resumed(scheme, by_torch_save)))


# - Optimizers that move parameters outside step() -------------------------------------


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., ICLR 2021), with two half steps."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **more: Any) -> None:
        super().__init__(params, {"rho": rho, **more})
        self.base = base(self.param_groups, **more)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["start"] = p.clone()
                p.data.add_(p.grad, alpha=group["rho"])
                p.grad = None

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["start"]
        self.base.step()


class ScheduleFree(torch.optim.Optimizer):
    """SGD on a sequence whose average is the model (Defazio et al., 2024)."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["steps"]).sub_(p.grad, alpha=0.1 * group["lr"])
                z.sub_(p.grad, alpha=group["lr"])

    @torch.no_grad()
    def _lerp(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.lerp_(self.state[p]["z"], weight)

    def eval(self) -> None:
        self._lerp(1 - 1 / 0.9)

    def train(self) -> None:
        self._lerp(0.1)


class InParts(torch.optim.Optimizer):
    """Climbs in every other call of step(), and comes back in the next."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                start = self.state[p].setdefault("start", torch.empty_like(p))
                if self.calls % 2:
                    start.copy_(p)
                    p.add_(p.grad, alpha=0.01)
                else:
                    p.copy_(start).sub_(p.grad, alpha=group["lr"])


def test_what_moves_parameters_by_what_a_rank_has_alone_is_refused() -> None:
    def run() -> None:
        model = network()
        free = ScheduleFree(model.parameters())
        with pytest.raises(ValueError, match=r"ScheduleFree.eval\(\) moves parameters"):
            gradtide.replicate(model, free, "topk(schedule='local')")
        sam = SAM(model.parameters(), torch.optim.SGD, lr=0.05)
        with pytest.raises(ValueError, match=r"SAM .*the optimizer inside"):
            gradtide.replicate(model, sam, "topk(schedule='local')")
        for optimizer in (free, sam):
            gradtide.replicate(model, optimizer, "topk").remove()

    run_ranks(2, run)


def test_the_optimizer_inside_sam_steps_from_where_all_ranks_are() -> None:
    def run() -> list[float]:
        model = network()
        sam = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
        sync = gradtide.replicate(model, sam.base, named("TopK", 0.1, "LOCAL"))
        for step in range(4):
            backward(model, step)
            sam.climb()
            backward(model, step)
            sam.descend()
            sam.zero_grad()
        assert undelivered(sync).any()
        sync.remove()
        return weights(model).tolist()  # type: ignore[no-any-return]

    first, second = run_ranks(2, run)
    assert first == second


def test_an_optimizer_whose_steps_are_not_seen_is_refused() -> None:
    def run() -> None:
        model, opt, sync = replica(named("TopK", 0.1, "LOCAL"))
        for _ in range(4):  # all alike: the user's own affair
            backward(model, 0)
        opt.step()
        for half in range(3):
            if half:
                climb(model)
            if half < 2:
                backward(model, 1)
        with pytest.raises(RuntimeError, match=r"differs .* after 3 backward passes"):
            backward(model, 1)
        sync.remove()

    @torch.no_grad()
    def climb(model: nn.Module) -> None:
        for p in model.parameters():
            p.add_(p.grad, alpha=0.01)  # type: ignore[arg-type]

    run_ranks(2, run)


@pytest.mark.product
@pytest.mark.parametrize("unlike", [0, 1, 2])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_from_unlike_parameters_is_refused(unlike: int, early: bool) -> None:
    """Whether one rank moved them or another, before backward or after it."""

    def run() -> None:
        model, opt, _ = replica(named("TopK", 0.1, "LOCAL"), "adamw")
        for step in range(3):
            if step:
                opt.step()
                opt.zero_grad()
            if early and step == 2:
                stray(model)
            backward(model, step)
        if not early:
            stray(model)
        with pytest.raises(
            RuntimeError, match=f"2.bias differs .* 0 and {unlike or 1}"
        ):
            opt.step()

    def stray(model: Any) -> None:
        if dist.get_rank() == unlike:
            model[2].bias.data[0] += 1e-6  # of which its version does not know

    run_ranks(3, run)


class Nameless(ScheduleFree):
    """Goes back to where its rank was, by no method that tells."""

    eval = None


@pytest.mark.parametrize("kind", [Nameless, InParts])
def test_what_goes_back_to_where_a_rank_was_is_refused(kind: Any) -> None:
    def run() -> None:
        model = network()
        opt = kind(model.parameters())
        with pytest.raises(ValueError, match=f"{kind.__name__} .*go back to where"):
            gradtide.replicate(model, opt, "topk(schedule='local')")
        gradtide.replicate(model, opt, "topk").remove()

    run_ranks(2, run)


# - What is refused --------------------------------------------------------------------


def test_what_needs_averaged_gradients_is_refused() -> None:
    def run() -> None:
        for scheme, word in (
            (
                "oktopk(0.01, schedule='local', momentum_correction=True)",
                "leave out momentum_correction",
            ),
            ("Scheme(Dense(), schedule=LOCAL, preconditioner=KFAC('mpd'))", "K-FAC"),
            ("Scheme(Dense(), schedule=Schedule('step', 'forward'))", "at 'step'"),
        ):
            with pytest.raises(ValueError, match=word):
                replica(scheme)
        with pytest.raises(ValueError, match="without 'local'"):
            comm_hook("oktopk(schedule='local')")
        model, opt, sync = replica("topk(schedule='local')")
        with pytest.raises(ValueError, match="state of its own"):
            sync.adopt("topk")
        backward(model, 0)
        opt.step()
        sync.remove()
        model, opt, sync = replica("topk")
        backward(model, 0)
        opt.step()
        with pytest.raises(ValueError, match="is no step"):
            sync.adopt("topk(schedule='local')")
        sync.remove()

    run_ranks(2, run)
