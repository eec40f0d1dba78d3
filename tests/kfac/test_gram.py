"""Products of rows against their definition."""

from __future__ import annotations

import pytest
import torch

from gradtide.kfac.packing import add_gram


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "width"), [(1, 3), (1, 300), (3, 40)])
def test_upper_triangle_of_weighted_sums(
    groups: int, width: int, dtype: torch.dtype, bias: bool
) -> None:
    parts = [torch.randn(groups, n, width).to(dtype) for n in (5, 1, 4)]
    d = width + bias
    rows = torch.cat(parts, 1).float()
    if bias:
        rows = torch.cat([rows, torch.ones(groups, 10, 1)], 2)
    products = rows.mT @ rows
    out = torch.full((groups, d, d), torch.nan)
    add_gram(out, parts, 0.5, 0.0, bias)
    torch.testing.assert_close(out.triu(), 0.5 * products.triu(), rtol=1e-4, atol=1e-4)
    add_gram(out, parts[:1], 0.25, 2.0, bias)
    first = rows[:, :5]
    expected = products + 0.25 * first.mT @ first
    torch.testing.assert_close(out.triu(), expected.triu(), rtol=1e-4, atol=1e-4)
