"""GTopK: merges of exactly k entries, and a residual that loses nothing."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from gradtide.collectives._entries import length
from gradtide.collectives.contrib.gtopk import GTopK, largest, rounds
from gradtide.collectives.dense import pays
from gradtide.core.ops import Group
from gradtide.core.payload import Payload
from gradtide.selectors import Exact, Threshold
from gradtide.testing import check_law, lockstep
from gradtide.wire import WIRES, codec_of

FLOATS = codec_of(None, torch.float32)
SIZES = (1, 2, 3, 4, 5, 8)  # sixteen, and seven, are in tests/test_law.py


def top(x: Tensor, k: int) -> Tensor:
    """`x` without all but its k largest entries; of equal ones the first stay."""
    order = x.abs().sort(descending=True, stable=True).indices[:k]
    return torch.zeros_like(x).index_copy_(0, order, x[order])


def reference(flats: list[Tensor], k: int) -> Tensor:
    """The merges on whole tensors."""
    sums = [top(flat, k) for flat in flats]
    core = 1 << (len(sums).bit_length() - 1)
    for extra in range(core, len(sums)):
        sums[extra - core] = top(sums[extra - core] + sums[extra], k)
    sums = sums[:core]
    while len(sums) > 1:
        sums = [top(a + b, k) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0] / len(flats)


def run(
    collective: GTopK, flats: list[Tensor], traffic: Counter[str] | None = None
) -> tuple[list[Tensor], list[Payload]]:
    size = len(flats)
    loads = [Payload(flat, [flat]) for flat in flats]
    flows = [
        collective.reduce(payload, Group(r, size)) for r, payload in enumerate(loads)
    ]
    return lockstep(flows, traffic), loads


def shared(rng: torch.Generator, n: int) -> Tensor:
    """Heavy-tailed gradients with a component that all ranks share."""
    common = torch.linspace(-1, 1, n).pow(3)
    return common + torch.randn(n, generator=rng).pow(3) / 4


@pytest.mark.parametrize("select", [Exact(), Threshold()], ids=repr)
@pytest.mark.parametrize("size", SIZES)
def test_law(size: int, select: Exact | Threshold) -> None:
    check_law(GTopK(0.02, select), size, steps=8)
    check_law(GTopK(0.03, select), size, steps=8, gradient=shared)
    check_law(GTopK(0.02, select), size, numel=size, steps=3)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@pytest.mark.parametrize("size", SIZES[1:])
def test_what_the_wire_rounds_off_stays_behind(size: int, wire) -> None:
    check_law(GTopK(0.03, Exact(), wire), size, steps=8, gradient=shared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision(dtype: torch.dtype) -> None:
    def gradient(rng: torch.Generator, n: int) -> Tensor:
        return torch.randn(n, generator=rng)

    for wire in (None, *WIRES):
        collective = GTopK(0.05, wire=wire)
        check_law(
            collective, 5, steps=8, dtype=dtype, tolerance=0.05, gradient=gradient
        )


@pytest.mark.product
@pytest.mark.parametrize("size", [3, 4, 6])
def test_what_is_coded_in_half_precision_is_not_coded_again(size: int) -> None:
    """As codes of small numbers it would be something else: for some ranks alone."""
    for magnitude in (1e-5, 1e-3, 1.0):

        def gradient(rng: torch.Generator, n: int, scale: float = magnitude) -> Tensor:
            return torch.randn(n, generator=rng).pow(3) * scale

        for seed in range(6):
            check_law(
                GTopK(0.1, wire="int8"),
                size,
                numel=(400 + seed) * size,
                steps=3,
                dtype=torch.float16,
                tolerance=3,  # the smallest numbers that there are
                gradient=gradient,
            )


@pytest.mark.parametrize("size", SIZES)
def test_the_mean_is_what_the_merges_leave(size: int) -> None:
    rng = torch.Generator().manual_seed(size)
    n, k = 60 * size, max(1, round(0.02 * 60 * size))
    for gradient in (shared, lambda rng, n: torch.randint(-2, 3, (n,), generator=rng)):
        flats = [gradient(rng, n).double() for _ in range(size)]
        expected = reference(flats, k) if size > 1 else flats[0].clone()
        means, _ = run(GTopK(0.02, _First()), flats)
        for mean in means:
            assert torch.equal(mean, means[0])
        torch.testing.assert_close(means[0], expected)


class _First:
    """Exact, and of equal entries the first."""

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        order = x.abs().sort(descending=True, stable=True).indices[:k]
        return order.sort().values.int()


@pytest.mark.parametrize("size", SIZES)
def test_density_one_is_dense(size: int) -> None:
    rng = torch.Generator().manual_seed(0)
    flats = [torch.randn(6 * size, generator=rng) for _ in range(size)]
    expected = torch.stack(flats).mean(0)
    means, loads = run(GTopK(1.0), flats)
    torch.testing.assert_close(means[0], expected)
    assert means[0].data_ptr() == loads[0].flat.data_ptr()


def test_everybody_takes_back_its_own_share_of_what_was_dropped() -> None:
    n = 40
    flats = [torch.zeros(n) for _ in range(4)]
    flats[0][5], flats[1][7] = 2.0, 3.0  # 5 is dropped by the first merge,
    flats[2][5], flats[3][5] = 4.0, 5.0  # but survives in the other branch
    means, loads = run(GTopK(0.01, Exact()), flats)
    assert means[0].nonzero().tolist() == [[5]]
    assert float(means[0][5]) == 9 / 4
    assert [float(payload.flat[5]) for payload in loads] == [2.0, 0.0, 0.0, 0.0]
    assert [float(payload.flat[7]) for payload in loads] == [0.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("size", SIZES[1:])
def test_traffic(size: int) -> None:
    n, k = 1000 * size, 10 * size
    message = length(k, n, FLOATS)
    core = 1 << (size.bit_length() - 1)
    expected = {"Swap": int(math.log2(core)) * core * message}
    expected["rounds"] = rounds(size)
    if core < size:
        expected["AllToAll"] = 2 * (size - core) * message
    traffic = check_law(
        GTopK(0.01), size, numel=n, steps=1, dtype=torch.float32, tolerance=1e-6
    )
    assert traffic == expected


def test_dense_where_the_messages_are_not_shorter() -> None:
    # An index takes 3 bits there: 1.09 log2(P) density words against 2 (P - 1) / P.
    limit = GTopK().pays_below(8)
    assert limit == pytest.approx(2 * 7 / 8 / (3 * (1 + 2.85 / 32)), rel=0.01)
    for k, shorter in ((99_000 * limit, True), (101_000 * limit, False)):
        sent = rounds(8) * length(round(k), 100_000, FLOATS)
        assert pays(sent, 100_000, 8, FLOATS) is shorter
    sizes = 2, 3, 4, 5, 7, 8, 16
    assert [rounds(size) for size in sizes] == [1, 3, 2, 4, 4, 3, 4]
    traffic = check_law(GTopK(0.6), 8)
    assert "Swap" not in traffic


@pytest.mark.parametrize("size", [2, 5, 8])
def test_zeros_and_ties(size: int) -> None:
    for value in (0.0, 1.0):
        check_law(GTopK(0.1), size, gradient=lambda _, n, v=value: torch.full((n,), v))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("wire", [None, "bf16"])
def test_what_is_not_finite_arrives_and_leaves(bad: float, size: int, wire) -> None:
    rng = torch.Generator().manual_seed(0)
    for owner in range(size):
        flats = [torch.randn(100 * size, generator=rng) for _ in range(size)]
        flats[owner][17] = bad
        means, loads = run(GTopK(0.01, Exact(), wire), flats)
        for mean in means:
            assert (~mean.isfinite()).nonzero().tolist() == [[17]]
        alarms = [math.isnan(payload.nonfinite) for payload in loads]
        assert alarms == [rank == owner for rank in range(size)]
        assert all(payload.flat.isfinite().all() for payload in loads)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_sum_that_is_too_large_for_the_wire_stays_in_part(size: int) -> None:
    flats = [torch.zeros(100 * size) for _ in range(size)]
    for flat in flats:
        flat[17] = -6e4  # fp16 holds it, and not twice as much
    means, loads = run(GTopK(0.01, Exact(), "fp16"), flats)
    total = size * means[0] + torch.stack([payload.flat for payload in loads]).sum(0)
    torch.testing.assert_close(total[17], torch.tensor(-6e4 * size))
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert means[0][17] * size == torch.finfo(torch.float16).min
    assert not any(math.isnan(payload.nonfinite) for payload in loads)


def test_the_largest_are_found_in_the_order_of_indices() -> None:
    values = torch.tensor([1.0, -3.0, 3.0, 0.0, 3.0, math.nan, -math.inf])
    picks = [largest(values, k).nonzero().squeeze(1).tolist() for k in range(1, 8)]
    assert picks[:4] == [[5], [5, 6], [1, 5, 6], [1, 2, 5, 6]]
    assert picks[4:] == [[1, 2, 4, 5, 6], [0, 1, 2, 4, 5, 6], list(range(7))]


@pytest.mark.parametrize("size", [4, 5])
def test_means_approach_the_mean_of_the_gradients(size: int) -> None:
    n, steps = 100 * size, 100
    rng = torch.Generator().manual_seed(0)
    target = torch.randn(size, n, generator=rng, dtype=torch.float64)
    flats = [torch.zeros(n, dtype=torch.float64) for _ in range(size)]
    loads = [Payload(flat, [flat]) for flat in flats]
    total = torch.zeros(n, dtype=torch.float64)
    for _ in range(steps):
        for flat, gradient in zip(flats, target, strict=True):
            flat += gradient
        flows = [
            GTopK(0.2).reduce(payload, Group(r, size))
            for r, payload in enumerate(loads)
        ]
        total += lockstep(flows)[0]
    error = (total / steps - target.mean(0)).norm() / target.mean(0).norm()
    assert error < 0.2


def test_hyper_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match=r"GTopK\(density"):
        GTopK(0)
