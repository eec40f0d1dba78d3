"""Local momentum, masked where it was sent; clipping before selection."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradtide.collectives.contrib.cltk import CLTk
from gradtide.collectives.contrib.gtopk import GTopK
from gradtide.collectives.dense import Dense
from gradtide.collectives.levels import by_levels
from gradtide.collectives.momentum_correction import (
    RESIDUAL,
    VELOCITY,
    MomentumCorrection,
    with_momentum,
)
from gradtide.collectives.topk import TopK
from gradtide.collectives.warmup import Warmup
from gradtide.core.ops import Cut, Group, in_halves
from gradtide.core.payload import Collective, Payload
from gradtide.selectors import Exact
from gradtide.testing import lockstep

SIZES = (2, 3, 4, 5, 7, 8, 16)


class Ranks:
    """Buckets of P ranks and the gradients that are added to them, step by step."""

    def __init__(
        self,
        size: int,
        n: int,
        dtype: torch.dtype = torch.float64,
        momentum: float = 0.9,  # of the optimizer
    ) -> None:
        self.rng = torch.Generator().manual_seed(size)
        self.flats = [torch.zeros(n, dtype=dtype) for _ in range(size)]
        self.loads = [Payload(flat, [flat]) for flat in self.flats]
        self.momentum = momentum
        self.velocities = torch.zeros(size, n, dtype=dtype)  # before masking

    def gradients(self) -> Tensor:
        new = torch.randn(len(self.flats), len(self.flats[0]), generator=self.rng)
        return new.to(self.flats[0].dtype)

    def add(self, gradients: Tensor) -> None:
        for flat, gradient in zip(self.flats, gradients, strict=True):
            flat += gradient

    def mean(self, collective: Collective) -> Tensor:
        size = len(self.flats)
        collective = with_momentum(collective, self.momentum, 1.0)
        flows = [
            collective.reduce(payload, Group(r, size))
            for r, payload in enumerate(self.loads)
        ]
        means = lockstep(flows)
        result = means[0].clone()
        for mean, flat in zip(means, self.flats, strict=True):
            assert torch.equal(mean.nan_to_num(), result.nan_to_num())
            if mean.data_ptr() == flat.data_ptr():
                flat.zero_()
        return result

    def state(self, key: str) -> Tensor:
        return torch.stack([payload.state[key] for payload in self.loads])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("inner", [Dense(), TopK(1.0), GTopK(1.0)], ids=repr)
def test_dense_is_sgd_with_momentum(size: int, inner: Collective) -> None:
    n = 4 * size
    ranks = Ranks(size, n)
    ours = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
    theirs = torch.nn.Parameter(ours.detach().clone())
    plain = torch.optim.SGD([ours], lr=0.1)
    momentum = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for _ in range(8):
        gradients = ranks.gradients()
        ranks.add(gradients)
        ours.grad = ranks.mean(MomentumCorrection(inner))
        theirs.grad = gradients.mean(0)
        plain.step()
        momentum.step()
        torch.testing.assert_close(ours, theirs)


def reference(
    size: int, n: int, k: int, steps: int, clip: float | None, gradients: Callable
) -> list[Tensor]:
    """Algorithm 1 of the paper with its appendix's momentum, on whole tensors."""
    u = torch.zeros(size, n, dtype=torch.float64)
    v = torch.zeros_like(u)
    means = []
    for _ in range(steps):
        g = gradients()
        if clip is not None:
            norms = g.norm(dim=1, keepdim=True)
            g = g * (clip / math.sqrt(size) / norms).clamp(max=1)
        u = 0.9 * u + g
        v = v + u
        mask = torch.zeros_like(u).scatter_(1, v.abs().topk(k, dim=1).indices, 1)
        means.append((v * mask).sum(0) / size)
        u, v = u * (1 - mask), v * (1 - mask)
    return means


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("clip", [None, 3.0])
def test_deep_gradient_compression(size: int, clip: float | None) -> None:
    n, k, steps = 50 * size, 2 * size, 12
    twin = Ranks(size, n)
    expected = reference(size, n, k, steps, clip, twin.gradients)
    ranks = Ranks(size, n)
    for mean in expected:
        ranks.add(ranks.gradients())
        ours = ranks.mean(MomentumCorrection(TopK(0.04, Exact()), clip=clip))
        torch.testing.assert_close(ours, mean)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "inner",
    [
        TopK(0.04),
        GTopK(0.04, wire="bf16"),
        CLTk(0.04),
        Warmup(TopK(0.04), 2, (1.0, 0.2)),
    ],
    ids=["topk", "gtopk", "cltk", "warmup"],
)
def test_the_law_of_what_is_offered(size: int, inner: Collective) -> None:
    ranks = Ranks(size, 40 * size)
    velocity: Tensor | float = 0.0
    for _ in range(8):
        ranks.add(ranks.gradients())
        before = torch.stack(ranks.flats).sum(0) + 0.9 * velocity
        mean = ranks.mean(MomentumCorrection(inner))
        after = torch.stack(ranks.flats).sum(0)
        torch.testing.assert_close(before, size * mean + after)
        velocity = ranks.state(VELOCITY).sum(0)
        assert torch.equal(torch.stack(ranks.flats), ranks.state(RESIDUAL))


def test_velocity_stops_where_entries_left_and_nowhere_else() -> None:
    ranks = Ranks(4, 400)
    inner = GTopK(0.02, Exact())
    for _ in range(5):
        gradients = ranks.gradients()
        flats = torch.stack(ranks.flats)
        continued = gradients.clone()
        if VELOCITY in ranks.loads[0].state:
            continued += 0.9 * ranks.state(VELOCITY)
        ranks.add(gradients)
        ranks.mean(MomentumCorrection(inner))
        stays = torch.stack(ranks.flats) != 0
        assert 0 < (~stays).sum() < 4 * 8
        torch.testing.assert_close(ranks.state(VELOCITY), continued * stays)
        torch.testing.assert_close(
            torch.stack(ranks.flats), (flats + continued) * stays
        )


def test_without_options_it_is_what_is_inside_bit_for_bit() -> None:
    plain, wrapped = (Ranks(3, 300, torch.float32, momentum=0.0) for _ in range(2))
    for _ in range(5):
        gradients = plain.gradients()
        plain.add(gradients)
        wrapped.add(gradients)
        expected = plain.mean(TopK(0.02))
        assert torch.equal(wrapped.mean(MomentumCorrection(TopK(0.02))), expected)
        assert torch.equal(torch.stack(wrapped.flats), torch.stack(plain.flats))
    known = plain.loads[0].state.keys() | {RESIDUAL}  # for momentum that sets in later
    assert wrapped.loads[0].state.keys() == known


def test_clipping_alone() -> None:
    ranks = Ranks(4, 40, momentum=0.0)
    collective = MomentumCorrection(TopK(0.1, Exact()), clip=2.0)
    remainder = torch.zeros(4, 40, dtype=torch.float64)
    for _ in range(4):
        gradients = ranks.gradients()
        ranks.add(gradients)
        mean = ranks.mean(collective)
        offered = remainder + gradients / gradients.norm(dim=1, keepdim=True)
        remainder = torch.stack(ranks.flats)
        torch.testing.assert_close(offered.sum(0), 4 * mean + remainder.sum(0))
    assert VELOCITY not in ranks.loads[0].state
    small = Ranks(4, 40, momentum=0.0)
    gradients = small.gradients() / 1000
    small.add(gradients)
    mean = small.mean(MomentumCorrection(Dense(), clip=2.0))
    torch.testing.assert_close(mean, gradients.mean(0))


@pytest.mark.parametrize("inner", [Dense(), TopK(0.04, Exact())], ids=["dense", "topk"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_arrives_and_does_not_stay(
    bad: float, clip: float | None, inner: Collective
) -> None:
    ranks = Ranks(2, 100)
    for step in range(4):
        gradients = ranks.gradients()
        if step == 1:
            gradients[0, 7] = bad
        ranks.add(gradients)
        mean = ranks.mean(MomentumCorrection(inner, clip=clip))
        expected = [[7]] if step == 1 else []
        assert (~mean.isfinite()).nonzero().tolist() == expected


@pytest.mark.parametrize("inner", [Dense(), CLTk(0.1, Exact())], ids=["dense", "led"])
def test_a_skipped_step_leaves_a_state_to_continue_from(inner: Collective) -> None:
    ranks = Ranks(2, 50_000)

    def held(flow):
        answer = None
        while True:
            asked = flow.send(answer)
            if isinstance(asked, Cut):
                flow.close()
                return asked.part
            answer = yield asked

    ranks.add(ranks.gradients())
    collective = MomentumCorrection(inner).with_momentum(0.9, 1.0)
    lockstep(
        [
            held(in_halves(collective.reduce(payload, Group(r, 2)), Group(r, 2)))
            for r, payload in enumerate(ranks.loads)
        ]
    )
    velocity = ranks.state(VELOCITY)
    if inner == Dense():
        assert not ranks.state(RESIDUAL).any()
        assert velocity.ne(0).sum() == 100_000
        for flat in ranks.flats:
            flat.zero_()  # as whoever dropped the flow does
    else:
        assert torch.equal(ranks.state(RESIDUAL), torch.stack(ranks.flats))
        assert (velocity == 0).sum(1).tolist() == [5000, 5000]
    gradients = ranks.gradients()
    before = torch.stack(ranks.flats) + gradients + 0.9 * velocity
    ranks.add(gradients)
    mean = ranks.mean(MomentumCorrection(inner))
    after = torch.stack(ranks.flats)
    torch.testing.assert_close(before.sum(0), 2 * mean + after.sum(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 0.9}, "give it to the optimizer"),
        ({"momentum": 0.0}, "give it to the optimizer"),
        ({"clip": 0.0}, "above 0"),
        ({"clip": math.inf}, "above 0"),
    ],
)
def test_hyper_parameters_are_checked(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MomentumCorrection(TopK(), **options)  # type: ignore[arg-type]


def test_an_all_zero_gradient() -> None:
    ranks = Ranks(3, 300)
    for _ in range(3):
        assert not ranks.mean(MomentumCorrection(TopK(), clip=1.0)).any()


@pytest.mark.parametrize("local", [1, 2, 3])
@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: Warmup(c, 2, (0.5,))])
def test_what_others_left_gets_no_momentum(local: int, wrap: Callable) -> None:
    """All of it arrives once, whichever rank and place of a host has what of it."""
    size = 2 * local
    ranks = Ranks(size, 24 * size)
    ranks.add(ranks.gradients())
    before = torch.stack(ranks.flats).sum(0)
    for payload in ranks.loads:
        payload.left = payload.flat.clone()
    collective = wrap(MomentumCorrection(TopK(0.2, Exact())))
    arrived = torch.zeros_like(before)
    for _ in range(12):
        arrived += size * ranks.mean(by_levels(collective, local))
        for payload in ranks.loads:
            payload.left = None
    assert not torch.stack(ranks.flats).any()
    torch.testing.assert_close(arrived, before)


def test_momentum_that_sets_in_late_finds_no_gradient_in_the_residual() -> None:
    ranks = Ranks(2, 100)
    collective = MomentumCorrection(TopK(0.05, Exact()))
    sums = torch.zeros(100, dtype=torch.float64)
    for step in range(50):
        if step < 3:
            fresh = ranks.gradients()
            ranks.add(fresh)
            sums += fresh.sum(0)
        ranks.momentum = 0.0 if step < 3 else 0.9
        sums -= 2 * ranks.mean(collective)
    assert not torch.stack(ranks.flats).any()
    torch.testing.assert_close(sums, torch.zeros_like(sums))


def test_dense_steps_between_sparse_ones_leave_nothing_to_compare_with() -> None:
    ranks = Ranks(2, 100)
    collective = Warmup(MomentumCorrection(TopK(0.05, Exact())), 2, (0.1, 1.0))
    for _ in range(4):
        ranks.add(ranks.gradients())
        ranks.mean(collective)
    fresh = ranks.gradients()
    ranks.add(fresh)
    ranks.mean(collective)
    sent = ranks.state(VELOCITY) == 0
    torch.testing.assert_close(ranks.state(VELOCITY)[~sent], fresh[~sent])
