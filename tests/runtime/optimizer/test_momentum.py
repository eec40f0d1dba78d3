"""The optimizer's momentum, computed before selection: on one rank's objects, and in
the product of optimizer, schedule, accumulation and clipping on real ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.test_sparse import (
    SCHEDULES,
    batch,
    by_torch_save,
    network,
    resumed,
    weights,
)
from torch import nn

import gradtide
from gradtide.collectives.momentum_correction import (
    VELOCITY,
    MomentumCorrection,
    moves,
    uses_optimizer_momentum,
    with_momentum,
)
from gradtide.collectives.topk import TopK
from gradtide.collectives.warmup import Warmup
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Collective, Payload
from gradtide.integrations.ddp import comm_hook
from gradtide.runtime.optimizer.momentum import Momentum
from gradtide.selectors import Exact
from gradtide.testing import lockstep

CUTS = "BySize(0.004, ends=0.001)"  # two buckets: DEAR holds one, the other runs on


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


# - What is read, taken and given back -------------------------------------------------


def test_factors_are_those_of_the_optimizers_momentum() -> None:
    sgd = torch.optim.SGD([parameter()], lr=1.0, momentum=0.8, dampening=0.5)
    assert Momentum(sgd).now() == (0.8, 0.5)
    adam = torch.optim.AdamW([parameter()], betas=(0.75, 0.95))
    momentum = Momentum(adam)
    assert momentum.now() == (0.75, 0.25)
    adam.param_groups[0]["betas"] = (0.5, 0.95)  # as OneCycleLR does
    assert momentum.now() == (0.5, 0.5)


def test_what_is_taken_is_given_back() -> None:
    adam = torch.optim.Adam([parameter()], betas=(0.75, 0.95))
    momentum = Momentum(adam)
    momentum.take()
    assert adam.param_groups[0]["betas"] == (0.0, 0.95)
    momentum.give_back()
    assert adam.param_groups[0]["betas"] == (0.75, 0.95)
    momentum.take()  # and the step raised
    assert momentum.now() == (0.75, 0.25)
    sgd = torch.optim.SGD([parameter()], lr=1.0, momentum=0.8, nesterov=True)
    momentum = Momentum(sgd)
    momentum.take()
    momentum.take()
    sgd.step()
    assert (sgd.param_groups[0]["momentum"], sgd.param_groups[0]["nesterov"]) == (
        0.0,
        False,
    )
    momentum.give_back()
    assert sgd.param_groups[0]["momentum"] == 0.8
    assert sgd.param_groups[0]["nesterov"]


def test_unknown_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match="not that of RMSprop"):
        Momentum(torch.optim.RMSprop([parameter()], momentum=0.9))
    groups = [{"params": [parameter()], "momentum": m} for m in (0.9, 0.5)]
    with pytest.raises(ValueError, match="groups differ"):
        Momentum(torch.optim.SGD(groups, lr=1.0))


# - Before selection -------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_law_with_the_optimizers_factors(size: int) -> None:
    rng = torch.Generator().manual_seed(size)
    flats = [torch.zeros(40 * size, dtype=torch.float64) for _ in range(size)]
    loads = [Payload(flat, [flat]) for flat in flats]
    velocity = torch.zeros(40 * size, dtype=torch.float64)
    for step in range(6):
        # A schedule may take it away, and bring it back.
        a, b = (0.0, 1.0) if step == 3 else (0.6, 0.4)
        collective = MomentumCorrection(TopK(0.05, Exact())).with_momentum(a, b)
        fresh = [torch.randn(flat.shape, generator=rng).double() for flat in flats]
        offered = torch.stack(flats).sum(0) + b * sum(fresh) + a * velocity
        for flat, gradient in zip(flats, fresh, strict=True):
            flat += gradient
        groups = [Group(rank, size) for rank in range(size)]
        flows = [collective.reduce(*each) for each in zip(loads, groups, strict=True)]
        mean = lockstep(flows)[0]
        after = torch.stack(flats).sum(0)
        torch.testing.assert_close(offered, size * mean + after)
        velocity = torch.stack([payload.state[VELOCITY] for payload in loads]).sum(0)


def test_in_dense_steps_it_stays_with_the_optimizer() -> None:
    warm = with_momentum(Warmup(MomentumCorrection(TopK(0.1)), 1), 0.9, 1.0)
    assert uses_optimizer_momentum(warm)
    assert not uses_optimizer_momentum(Warmup(TopK(0.1), 1))
    flats = [torch.randn(20) for _ in range(2)]
    loads = [Payload(flat, [flat]) for flat in flats]
    for moved in (False, True):
        assert [moves(warm, payload.state) for payload in loads] == [moved, moved]
        flows = [warm.reduce(payload, Group(r, 2)) for r, payload in enumerate(loads)]
        lockstep(flows)
        assert [VELOCITY in payload.state for payload in loads] == [moved, moved]


# - On real ranks ----------------------------------------------------------------------


def optimizer(kind: str, model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    # So large an epsilon tells a gradient from its tenfold.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(momentum, 0.9), eps=1)


def train(kind: str, own: float, scheme: str, accumulate: int, clip: bool) -> list[Any]:
    """The weights, and the optimizer's momentum as its owner sees it."""
    model = network()
    opt = optimizer(kind, model, own)
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(6):
        with sync.no_sync():
            for part in range(accumulate - 1):
                model(batch(100 + 10 * step + part)).square().mean().backward()
        model(batch(step)).square().mean().backward()
        if clip:
            sync.clip_grad_norm_(0.1)
        opt.step()
        opt.zero_grad()
    sync.remove()
    (group,) = opt.param_groups
    return [weights(model).tolist(), group.get("momentum"), group.get("betas")]


def scheme(schedule: str, warmup: bool = False) -> str:
    inner = "MomentumCorrection(TopK(0.1))"
    if warmup:
        inner = f"Warmup({inner}, 3)"
    return f"Scheme({inner}, {CUTS}, {schedule})"


@dataclass(frozen=True)
class Explicit:
    """A momentum of .8, whatever that of the optimizer is, which keeps its own."""

    corrected: Collective

    def reduce(self, payload: Payload, group: Group) -> Flow:
        return with_momentum(self.corrected, 0.8, 1.0).reduce(payload, group)


def test_it_is_an_optimizer_without_and_an_explicit_factor() -> None:
    explicit = f"Scheme({__name__}.Explicit(MomentumCorrection(TopK(0.1))), {CUTS}, "
    product = list(itertools.product(SCHEDULES, (1, 2), (False, True)))

    def run() -> list[Any]:
        return [
            (
                train("sgd", 0.8, scheme(schedule), *case),
                train("sgd", 0.0, f"{explicit}{schedule})", *case),
            )
            for schedule, *case in product
        ]

    ranks = run_ranks(2, run)
    assert ranks[0] == ranks[1]
    for case, (taken, explicit) in zip(product, ranks[0], strict=True):
        assert taken[0] == explicit[0], case
        assert taken[1] == 0.8, case


def test_alone_it_stays_with_the_optimizer() -> None:
    def run() -> list[Any]:
        return [train("sgd", 0.8, s, 1, False) for s in (scheme("WFBP"), "wfbp")]

    ((corrected, plain),) = run_ranks(1, run)
    assert corrected == plain


@pytest.mark.slow
def test_under_adam_schedules_agree_and_replicas_do_not_differ() -> None:
    product = list(itertools.product((1, 2), (False, True), (False, True)))

    def run() -> list[Any]:
        return [
            [
                train("adamw", 0.8, scheme(s, warmup), accumulate, clip)
                for s in SCHEDULES
            ]
            for accumulate, clip, warmup in product
        ]

    ranks = run_ranks(2, run)
    assert ranks[0] == ranks[1]
    for case, (first, *others) in zip(product, ranks[0], strict=True):
        assert first[2] == (0.8, 0.9), case
        for other in others:
            torch.testing.assert_close(
                torch.tensor(other[0]), torch.tensor(first[0]), msg=str(case)
            )


def test_under_adam_it_is_a_share_of_what_arrives_without_momentum() -> None:
    run_ranks(2, _by_hand)


def _by_hand() -> None:
    """A dense step of Adam, and one from the largest of a fifth of the gradients."""
    model, twin = network(), network()
    opt, hand = (optimizer("adamw", m, 0.8) for m in (model, twin))
    text = f"Scheme(Warmup(MomentumCorrection(TopK(0.1, Exact())), 1), {CUTS}, WFBP)"
    sync = gradtide.replicate(model, opt, text)
    for step, share in enumerate((1.0, 0.2)):
        model(batch(step)).square().mean().backward()
        twin(batch(step)).square().mean().backward()
        for p, delivered in zip(twin.parameters(), model.parameters(), strict=True):
            assert p.grad is not None
            assert delivered.grad is not None
            each = [torch.empty_like(p) for _ in range(2)]
            dist.all_gather(each, p.grad)
            sums = [share / 2 * s for s in (each[0], each[1], each[0] + each[1])]
            gaps = [(delivered.grad - s).abs() for s in (*sums, torch.zeros_like(p))]
            if step == 0:
                gaps = gaps[2:3]
            assert torch.stack(gaps).amin(0).max() < 1e-7
            p.grad = delivered.grad.clone()
        if step == 1:
            hand.param_groups[0]["betas"] = (0.0, 0.9)
        opt.step()
        hand.step()
        opt.zero_grad()
        hand.zero_grad()
    assert opt.param_groups[0]["betas"] == (0.8, 0.9)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    sync.remove()


@pytest.mark.parametrize("schedule", ["WFBP", "DEAR"])
def test_a_resumed_run_is_the_same_run(schedule: str) -> None:
    text = scheme(schedule, warmup=True)
    assert all(run_ranks(2, lambda: resumed(text, by_torch_save)))


def _skipping(schedule: str) -> list[float]:
    """Train with a NaN on rank 1 in step 3, which a GradScaler skips."""
    model = network()
    opt = optimizer("adamw", model, 0.8)
    sync = gradtide.replicate(model, opt, scheme(schedule, warmup=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(7):
        loss = model(batch(step)).square().mean()
        if step == 3 and dist.get_rank() == 1:
            loss = loss + model[2].weight[3, 4] * math.nan
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert opt.param_groups[0]["betas"] == (0.8, 0.9)
    sync.remove()
    return weights(model).tolist()


@pytest.mark.parametrize("schedule", ["WFBP", "DEAR"])
def test_a_skipped_step_skips_momentum_too(schedule: str) -> None:
    first, second = run_ranks(2, _skipping, schedule)
    assert first == second
    assert all(map(math.isfinite, first))


def test_refusals_before_anything_is_exchanged() -> None:
    run_ranks(2, _refusals)


def _refusals() -> None:
    model = network()
    adagrad = torch.optim.Adagrad(model.parameters())
    with pytest.raises(ValueError, match="not that of Adagrad"):
        gradtide.replicate(model, adagrad, "topk(0.01, momentum_correction=True)")
    sync = gradtide.replicate(model, adagrad, "topk")
    with pytest.raises(ValueError, match="not that of Adagrad"):
        sync.adopt("topk(0.01, momentum_correction=True)")
    sync.remove()
    with pytest.raises(ValueError, match="does not see the optimizer's momentum"):
        comm_hook("topk(0.01, momentum_correction=True)")
