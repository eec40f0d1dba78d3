"""Damped inverses against explicit Kronecker products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradtide.kfac.invert import (
    dampings,
    eigen,
    inverse,
    kl_part,
    kl_scale,
    precondition,
    write_back,
)
from gradtide.kfac.layers import supported

DAMPING = 0.03


@pytest.fixture(autouse=True)
def same_gradients() -> None:
    """Whatever ran before."""
    torch.manual_seed(0)


def definite(groups: int, d: int, seed: int = 0) -> Tensor:
    x = torch.randn(groups, d + 3, d, generator=torch.Generator().manual_seed(seed + d))
    return x.mT @ x / d


def test_factored_damping_is_the_textbook_one() -> None:
    a, g, v = definite(1, 4), definite(1, 3), torch.randn(1, 3, 4)
    pi = ((a[0].trace() / 4) / (g[0].trace() / 3)).sqrt()
    a_damped = a[0] + pi * DAMPING**0.5 * torch.eye(4)
    g_damped = g[0] + DAMPING**0.5 / pi * torch.eye(3)
    expected = torch.linalg.solve(
        torch.kron(g_damped, a_damped).double(), v.flatten().double()
    )
    means = [x.diagonal(dim1=1, dim2=2).mean(1) for x in (a, g)]
    damping_a, damping_g = dampings(*means, DAMPING)
    both = {"A": inverse(a, damping_a, "a"), "G": inverse(g, damping_g, "g")}
    found = precondition(v, both, DAMPING).flatten().double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_eigen_form_damps_the_product_exactly() -> None:
    a, g, v = definite(2, 4), definite(2, 3), torch.randn(2, 3, 4)
    found = precondition(v, {"A": eigen(a, "a"), "G": eigen(g, "g")}, DAMPING)
    for i in range(2):
        product = torch.kron(g[i], a[i]).double() + DAMPING * torch.eye(12)
        expected = torch.linalg.solve(product, v[i].flatten().double())
        actual = found[i].flatten().double()
        # Of the largest: the product's condition number is 183, float32's eps 1.2e-7.
        close = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=0, atol=close)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_how_a_scale_is_shared_between_the_factors_does_not_matter(
    scale: float,
) -> None:
    a, g, v = definite(1, 5), definite(1, 5, seed=1), torch.randn(1, 5, 5)

    def result(a: Tensor, g: Tensor) -> Tensor:
        pair = dampings(*(x.diagonal(dim1=1, dim2=2).mean(1) for x in (a, g)), DAMPING)
        both = map(inverse, (a, g), pair, "ag")
        return precondition(v, dict(zip("AG", both, strict=True)), DAMPING)

    torch.testing.assert_close(
        result(a * scale, g / scale), result(a, g), rtol=1e-4, atol=1e-6
    )


def test_factors_of_zeros_are_damped_all_the_same() -> None:
    for a, g in ((0.0, 2.0), (2.0, 0.0), (0.0, 0.0)):
        pair = dampings(torch.tensor([a]), torch.tensor([g]), 0.04)
        assert [x.item() for x in pair] == pytest.approx([0.2, 0.2])


def test_a_factor_that_rounding_made_indefinite_gets_more_damping() -> None:
    factor = torch.diag(torch.tensor([1.0, 1.0, -2e-3]))[None]
    found = inverse(factor, torch.tensor([1e-3]), "conv1 A")
    expected = torch.linalg.inv(factor + 1e-2 * torch.eye(3))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bad", [-1.0, torch.nan])
def test_a_hopeless_factor_is_named(bad: float) -> None:
    factor = torch.diag(torch.tensor([1.0, bad]))[None]
    with pytest.raises(RuntimeError, match="conv1 A"):
        inverse(factor, torch.tensor([1e-3]), "conv1 A")


def test_factor_is_not_changed_by_inversion() -> None:
    factor = definite(1, 6)
    before = factor.clone()
    inverse(factor, torch.tensor([1.0]), "a")
    eigen(factor, "a")
    assert torch.equal(factor, before)


# - KL clipping and gradients ----------------------------------------------------------


def test_kl_clipping_limits_the_step_and_leaves_short_ones_alone() -> None:
    v, p = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    parts = [kl_part(v, p, 0.5), kl_part(v, v, 0.1)]
    expected = 0.25 * (v * p).sum() + 0.01 * (v * v).sum()
    nu = kl_scale(parts, 1e-3)
    torch.testing.assert_close(nu, (1e-3 / expected.abs()).sqrt().clamp(max=1.0))
    assert kl_scale([torch.tensor(1e-9)], 1e-3) == 1


def test_gradients_are_overwritten_in_place_with_the_scaled_ones() -> None:
    layer = supported(nn.Linear(3, 2))[0]
    weight, bias = torch.randn(2, 3), torch.randn(2)
    gradient = layer.matrix(weight, bias)
    assert torch.equal(gradient, torch.cat([weight, bias[:, None]], 1)[None])
    before = (weight.clone(), bias.clone())
    write_back(layer, 2 * gradient, [weight, bias], torch.tensor(0.25))
    torch.testing.assert_close(weight, before[0] / 2)
    torch.testing.assert_close(bias, before[1] / 2)


def test_gradients_of_convolutions_in_channels_last() -> None:
    module = nn.Conv2d(4, 6, 3, groups=2).to(memory_format=torch.channels_last)
    layer = supported(module)[0]
    weight = torch.randn_like(module.weight)
    bias = torch.randn(6)
    before = weight.clone()
    gradient = layer.matrix(weight, bias)
    assert gradient.shape == (2, 3, 19)
    write_back(layer, -gradient, [weight, bias])
    assert torch.equal(weight, -before)
