"""TopK: the gathered union of what everybody selected."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from gradtide.collectives._entries import kept, length, summed
from gradtide.collectives.dense import Dense, pays
from gradtide.collectives.topk import TopK
from gradtide.core.ops import Group
from gradtide.core.payload import Payload
from gradtide.selectors import Exact, Threshold
from gradtide.testing import check_law, lockstep
from gradtide.wire import codec_of

FLOATS = codec_of(None, torch.float32)
SIZES = (1, 2, 3, 4, 5, 8)  # sixteen, and seven, are in tests/test_law.py


def grads(size: int, n: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=rng, dtype=torch.float64) for _ in range(size)]


def run(
    collective: object, flats: list[Tensor], traffic: Counter[str] | None = None
) -> tuple[Tensor, list[Payload]]:
    loads = [Payload(flat, [flat]) for flat in flats]
    flows = [
        collective.reduce(payload, Group(r, len(flats)))  # type: ignore[attr-defined]
        for r, payload in enumerate(loads)
    ]
    means = lockstep(flows, traffic)
    for mean in means[1:]:
        assert torch.equal(mean.nan_to_num(7.0), means[0].nan_to_num(7.0))
    return means[0].clone(), loads


@pytest.mark.parametrize("select", [Exact(), Threshold()], ids=repr)
@pytest.mark.parametrize("size", SIZES)
def test_law(size: int, select: Exact | Threshold) -> None:
    check_law(TopK(0.02, select), size)
    check_law(TopK(0.02, select), size, numel=size, steps=5)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@pytest.mark.parametrize("size", SIZES[1:])
def test_what_the_wire_rounds_off_stays_behind(size: int, wire) -> None:
    check_law(TopK(0.02, Exact(), wire), size)


@pytest.mark.parametrize("size", SIZES)
def test_density_one_is_dense(size: int) -> None:
    flats = grads(size, 6 * size)
    mean, loads = run(TopK(1.0), [flat.clone() for flat in flats])
    torch.testing.assert_close(mean, torch.stack(flats).mean(0))
    assert all(payload.num_sent == 0 for payload in loads)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_mean_is_that_of_the_selected_entries(size: int) -> None:
    flats = grads(size, 50 * size)
    k = kept(0.04, 50 * size)
    chosen = torch.zeros(size, 50 * size, dtype=torch.float64)
    for row, flat in zip(chosen, flats, strict=True):
        best = torch.topk(flat.abs(), k).indices
        row[best] = flat[best]
    mean, loads = run(TopK(0.04, Exact()), [flat.clone() for flat in flats])
    torch.testing.assert_close(mean, chosen.sum(0) / size)
    for payload, flat, row in zip(loads, flats, chosen, strict=True):
        assert torch.equal(payload.flat, flat - row)


def test_traffic_and_when_the_bucket_is_dense() -> None:
    size, n, k = 8, 80_000, 800
    # float32, 6 low bits of an index, and a row of bits for what is above; aligned
    message = 4 * k + 6 * k // 8 + 257 + 7
    assert message == length(k, n, FLOATS)
    traffic = check_law(
        TopK(0.01, Exact()), size, numel=n, steps=1, dtype=torch.float32, tolerance=1e-6
    )
    assert traffic == {"AllGather": size * (size - 1) * message, "rounds": 1}
    limit = TopK().pays_below(size)
    assert limit == pytest.approx(2 / (size * (1 + 4 / 32)), rel=0.01)
    for dense, density in ((False, limit * 0.99), (True, limit * 1.01)):
        sent = (size - 1) * length(kept(density, n), n, FLOATS)
        assert pays(sent, n, size, FLOATS) != dense
        traffic = check_law(
            TopK(density, Exact()), size, numel=n, steps=1, dtype=torch.float32,
            tolerance=1e-5,
        )  # fmt: skip
        assert ("Mean" in traffic) == dense
    assert not pays(0, 10, 1, FLOATS)
    half = codec_of("bf16", torch.float32)
    assert pays(7 * length(195, 1000, half), 1000, 8, half)
    assert not pays(7 * length(200, 1000, half), 1000, 8, half)


def test_zeros_ties_and_one_element_a_rank() -> None:
    for value in (0.0, 1.0):
        check_law(TopK(0.1), 4, gradient=lambda _, n, v=value: torch.full((n,), v))
    for size in (2, 5):
        check_law(TopK(0.01, Exact()), size, numel=size, steps=10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("wire", [None, "bf16"])
def test_what_is_not_finite_arrives_and_leaves(bad: float, wire) -> None:
    flats = grads(3, 300)
    flats[1][17] = bad
    mean, loads = run(TopK(0.02, Exact(), wire), flats)
    assert not mean[17].isfinite()
    assert mean.isfinite().sum() == 299
    assert [math.isnan(payload.nonfinite) for payload in loads] == [False, True, False]
    assert all(payload.flat.isfinite().all() for payload in loads)


def test_what_overflows_on_the_wire_raises_the_alarm() -> None:
    flats = [torch.full((200,), 1.0) for _ in range(2)]
    flats[0][3] = 1e5  # above what fp16 holds
    mean, loads = run(TopK(0.01, Exact(), "fp16"), flats)
    assert mean[3].isinf()
    assert math.isnan(loads[0].nonfinite)
    assert loads[0].flat.isfinite().all()


def test_means_approach_the_mean_of_the_gradients() -> None:
    size, n, steps = 4, 400, 400
    target = torch.stack(grads(size, n))
    flats = [torch.zeros(n, dtype=torch.float64) for _ in range(size)]
    loads = [Payload(flat, [flat]) for flat in flats]
    total = torch.zeros(n, dtype=torch.float64)
    for _ in range(steps):
        for flat, gradient in zip(flats, target, strict=True):
            flat += gradient
        flows = [
            TopK(0.02).reduce(payload, Group(r, size))
            for r, payload in enumerate(loads)
        ]
        total += lockstep(flows)[0]
    error = (total / steps - target.mean(0)).norm() / target.mean(0).norm()
    assert error < 0.15


def test_sums_are_added_in_the_order_of_ranks() -> None:
    entries = [
        (torch.tensor([1, 5], dtype=torch.int32), torch.tensor([1e8, 1.0])),
        (torch.tensor([5, 6], dtype=torch.int32), torch.tensor([2.0, 3.0])),
        (torch.tensor([1], dtype=torch.int32), torch.tensor([-1e8])),
        (torch.tensor([1], dtype=torch.int32), torch.tensor([1.0])),
    ]
    where, sums = summed(entries, torch.float32)
    assert where.tolist() == [1, 5, 6]
    assert sums.tolist() == [1.0, 3.0, 3.0]


@pytest.mark.parametrize("density", [0, -0.1, 1.5])
def test_a_density_that_is_no_share_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match="share of entries"):
        TopK(density)


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16"):
        TopK(wire="int7")  # type: ignore[arg-type]


def test_a_bucket_that_does_not_pay_is_dense_with_the_same_wire() -> None:
    flats = [flat.float() for flat in grads(4, 16)]
    mean, _ = run(TopK(1.0, wire="bf16"), [flat.clone() for flat in flats])
    expected, _ = run(Dense("bf16"), flats)
    assert torch.equal(mean, expected)
