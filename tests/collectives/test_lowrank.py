"""Low rank: the law, replicas that never drift, and the papers' algorithms."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from gradtide.collectives.contrib.acpsgd import ACPSGD
from gradtide.collectives.lowrank import (
    Place,
    PowerSGD,
    matrices_of,
    orthonormal,
)
from gradtide.core.ops import Group
from gradtide.core.payload import Collective, Payload
from gradtide.testing import lockstep

SIZES = (1, 2, 3, 4, 5, 8)  # sixteen, and seven, are in tests/test_law.py
SHAPES = ((12,), (24, 16), (24, 16), (16, 4, 3, 3), (3, 4), (5,))
both = pytest.mark.parametrize("collective", [PowerSGD(2), ACPSGD(2)], ids=repr)


def bucket_like(
    size: int, shapes=SHAPES, dtype=torch.float64, channels_last: bool = False
) -> Payload:
    """A bucket of zeros as `layout` makes it: every slot a multiple of `size`."""
    slots = [-(-math.prod(shape) // size) * size for shape in shapes]
    flat = torch.zeros(sum(slots), dtype=dtype)
    parts = []
    for piece, shape in zip(flat.split(slots), shapes, strict=True):
        part = piece[: math.prod(shape)]
        if channels_last and len(shape) == 4:
            like = torch.empty(shape).to(memory_format=torch.channels_last)
            part = part.as_strided(shape, like.stride(), part.storage_offset())
        parts.append(part.view(shape) if part.dim() == 1 else part)
    return Payload(flat, parts)


def fill(loads: list[Payload], rng: torch.Generator) -> Tensor:
    """Add a gradient to every part; returns the sum over all ranks of what is there."""
    for payload in loads:
        for part in payload.parts:
            part += torch.randn(part.shape, generator=rng, dtype=part.dtype)
    return torch.stack([payload.flat for payload in loads]).sum(0)


def step(
    collective: Collective, loads: list[Payload], traffic: Counter[str] | None = None
) -> list[Tensor]:
    group = range(len(loads))
    flows = [collective.reduce(loads[r], Group(r, len(loads))) for r in group]
    return lockstep(flows, traffic)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", SIZES)
@both
def test_law(collective: Collective, size: int, channels_last: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    loads = [bucket_like(size, channels_last=channels_last) for _ in range(size)]
    for _ in range(6):
        before = fill(loads, rng)
        means = step(collective, loads)
        assert all(torch.equal(mean, means[0]) for mean in means)
        if size == 1:
            torch.testing.assert_close(means[0], before)
            loads[0].flat.zero_()
            continue
        after = torch.stack([payload.flat for payload in loads]).sum(0)
        torch.testing.assert_close(size * means[0] + after, before)
        for key, value in loads[0].state.items():
            for payload in loads[1:]:
                assert torch.equal(payload.state[key], value), f"{key} drifted"


def test_power_sgd_is_the_power_iteration() -> None:
    size, rank, shape = 3, 2, (24, 16)
    rng = torch.Generator().manual_seed(0)
    loads = [bucket_like(size, [shape]) for _ in range(size)]
    right = None
    for _ in range(4):
        fill(loads, rng)
        mean = torch.stack([payload.parts[0] for payload in loads]).mean(0)
        got = step(PowerSGD(rank), loads)[0].view(shape)
        if right is not None:
            basis = torch.linalg.qr(mean @ right)[0]
            torch.testing.assert_close(got, basis @ (basis.T @ mean))
        assert torch.linalg.matrix_rank(got) == rank
        right = loads[0].state["right"].view(-1, rank)


def test_acp_alternates_between_columns_and_rows() -> None:
    size, rank, shape = 3, 2, (24, 16)
    rng = torch.Generator().manual_seed(0)
    loads = [bucket_like(size, [shape]) for _ in range(size)]
    for turn in range(5):
        fill(loads, rng)
        mean = torch.stack([payload.parts[0] for payload in loads]).mean(0)
        state = dict(loads[0].state)
        got = step(ACPSGD(rank), loads)[0].view(shape)
        if turn == 0:
            continue
        known = state["left" if turn % 2 else "right"].view(-1, rank)
        basis = torch.linalg.qr(known)[0]
        span = basis @ basis.T
        torch.testing.assert_close(got, span @ mean if turn % 2 else mean @ span)


@both
def test_a_matrix_of_low_rank_arrives_as_it_is(collective: Collective) -> None:
    size, shape = 4, (24, 16)
    rng = torch.Generator().manual_seed(0)
    kind = {"generator": rng, "dtype": torch.float64}
    u, v = torch.randn(24, 2, **kind), torch.randn(2, 16, **kind)
    loads = [bucket_like(size, [shape]) for _ in range(size)]
    for _ in range(4):  # ACP-SGD: after an odd number the basis is of columns
        for rank, payload in enumerate(loads):
            payload.parts[0].add_(u @ v, alpha=rank + 1.0)
        mean = torch.stack([payload.parts[0] for payload in loads]).mean(0)
        got = step(collective, loads)[0].view(shape)
    torch.testing.assert_close(got, mean)
    for payload in loads:
        assert payload.flat.abs().max() < 1e-9


@both
def test_replicas_agree_whatever_the_global_random_state(
    collective: Collective,
) -> None:
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        loads = [bucket_like(2) for _ in range(2)]
        fill(loads, torch.Generator().manual_seed(0))
        results.append(step(collective, loads)[0].clone())
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*results)


def test_traffic_is_the_formula() -> None:
    size, rank, shapes = 4, 3, ((64, 48), (100,), (32, 32))
    rows, columns, dense = 64 + 32, 48 + 32, 100
    for collective, steps, elements in (
        (PowerSGD(rank), 2, 2 * (rank * (rows + columns) + dense)),
        (ACPSGD(rank), 2, rank * (rows + columns) + 2 * dense),
    ):
        loads = [bucket_like(size, shapes) for _ in range(size)]
        traffic: Counter[str] = Counter()
        for _ in range(steps):
            fill(loads, torch.Generator().manual_seed(0))
            step(collective, loads, traffic)
        rounds = traffic.pop("rounds")
        assert rounds == steps * (2 if isinstance(collective, PowerSGD) else 1)
        assert sum(traffic.values()) == 2 * (size - 1) * 8 * elements


def test_what_is_a_matrix() -> None:
    own = bucket_like(4)
    assert matrices_of(own, 2) == [
        Place(12, 24, 16),
        Place(396, 24, 16),
        Place(780, 16, 36),
    ]
    assert matrices_of(own, 10) == [Place(780, 16, 36)]
    assert matrices_of(bucket_like(4, [(9,), (1, 50), (4, 4)]), 2) == []


@both
def test_a_bucket_without_matrices_is_dense(collective: Collective) -> None:
    loads = [bucket_like(4, [(9,), (3, 3)]) for _ in range(4)]
    before = fill(loads, torch.Generator().manual_seed(0))
    for payload, mean in zip(loads, step(collective, loads), strict=True):
        assert mean.data_ptr() == payload.flat.data_ptr()
        torch.testing.assert_close(mean, before / 4)


@both
def test_zero_gradients_do_no_harm(collective: Collective) -> None:
    loads = [bucket_like(3) for _ in range(3)]
    for _ in range(4):
        assert not step(collective, loads)[0].any()
    rng = torch.Generator().manual_seed(0)
    fill(loads, rng)
    for _ in range(2):
        mean = step(collective, loads)[0]
    assert mean.isfinite().all()
    assert mean.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 100])
@both
def test_what_is_not_finite_arrives_and_does_not_stay(
    collective: Collective, place: int, bad: float
) -> None:
    rng = torch.Generator().manual_seed(0)
    loads = [bucket_like(3) for _ in range(3)]
    for _ in range(3):
        fill(loads, rng)
        step(collective, loads)
    fill(loads, rng)
    loads[1].flat[place] = bad
    means = step(collective, loads)
    assert math.isnan(loads[1].nonfinite)
    for mean, payload in zip(means, loads, strict=True):
        assert not mean[place].isfinite()
        assert payload.flat.isfinite().all()
    for _ in range(3):
        fill(loads, rng)
        assert step(collective, loads)[0].isfinite().all()


@both
def test_the_mean_of_means_approaches_the_mean_of_gradients(
    collective: Collective,
) -> None:
    size, steps = 3, 150
    loads = [bucket_like(size, [(12, 10)]) for _ in range(size)]
    rng = torch.Generator().manual_seed(0)
    fill(loads, rng)
    gradients = [payload.flat.clone() for payload in loads]
    for payload in loads:
        payload.flat.zero_()
    total = torch.zeros_like(gradients[0])
    for _ in range(steps):
        for payload, gradient in zip(loads, gradients, strict=True):
            payload.flat += gradient
        total += step(collective, loads)[0]
    expected = torch.stack(gradients).mean(0)
    assert (total / steps - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@both
def test_half_precision(collective: Collective, dtype: torch.dtype) -> None:
    loads = [bucket_like(2, dtype=dtype) for _ in range(2)]
    before = fill(loads, torch.Generator().manual_seed(0))
    mean = step(collective, loads)[0]
    after = loads[0].flat + loads[1].flat
    torch.testing.assert_close(2 * mean + after, before, atol=0.1, rtol=0.1)


def test_bases_are_orthonormal_even_of_nothing() -> None:
    rng = torch.Generator().manual_seed(0)
    dependent = torch.ones(9, 3)
    tiny = torch.randn(9, 3, generator=rng) * 1e-30
    broken = torch.full((9, 3), math.nan)
    bases = orthonormal([torch.zeros(9, 3), dependent, tiny, broken])
    for basis in bases[:3]:
        torch.testing.assert_close(basis.T @ basis, torch.eye(3))
    assert bases[3].isnan().all()


@pytest.mark.parametrize("make", [PowerSGD, ACPSGD])
def test_a_rank_below_one_is_refused(make: type[PowerSGD] | type[ACPSGD]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make(0)
