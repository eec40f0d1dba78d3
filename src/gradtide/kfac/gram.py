"""Sums of outer products of rows: the one expensive kernel of K-FAC's statistics."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # rows computed at once on a CPU; less => less of the lower triangle
BLOCK_ON_DEVICE = 2048


def add_gram(
    out: Tensor, parts: Iterable[Tensor], alpha: float, beta: float, bias: bool
) -> None:
    """Upper triangles of out = beta * out + alpha * sum_r row_r row_r^T, per group.

    `out` is fp32 [groups, d, d]; with beta = 0 it may hold anything. Each part is
    [groups, rows, d] of any float type, or one less wide with `bias`, which puts a 1 at
    the end of every row. What is below the diagonal is undefined.
    """
    for rows in parts:
        rows = rows.float()
        width = rows.shape[2]
        _add_products(out[:, :width, :width], rows, alpha, beta)
        if bias:  # the products [groups, d] of all rows with the 1 at their end
            column = out[..., width]
            sums = alpha * F.pad(rows.sum(1), (0, 1), value=rows.shape[1])
            # With beta = 0 the column may hold NaNs.
            column.copy_(sums + beta * column if beta else sums)
        beta = 1.0


def _add_products(out: Tensor, rows: Tensor, alpha: float, beta: float) -> None:
    """Blocks of rows of `out` from the diagonal on: no product of the lower half."""
    groups, d, _ = out.shape
    if groups > 1:
        torch.baddbmm(out, rows.mT, rows, beta=beta, alpha=alpha, out=out)
        return
    x, y = rows[0], out[0]
    step = BLOCK if out.device.type == "cpu" else BLOCK_ON_DEVICE
    for i in range(0, d, step):
        left, right = x[:, i : i + step].T, x[:, i:]
        y[i : i + step, i:].addmm_(left, right, beta=beta, alpha=alpha)
