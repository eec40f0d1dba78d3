"""Symmetric matrices: sums of outer products, and as flat tensors.

What is packed has d (d + 1) / 2 elements, whose order is this module's own: first the
blocks of rows right of the diagonal blocks, one after the other, then the upper
triangles of the diagonal blocks. Blocks are copied as rectangles, so that no index as
long as the matrix is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # rows; more => longer indices, fewer copies
ROWS = 256  # computed at once on a CPU; less => less of the lower triangle
ROWS_ON_DEVICE = 2048


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
    step = ROWS if out.device.type == "cpu" else ROWS_ON_DEVICE
    for i in range(0, d, step):
        left, right = x[:, i : i + step].T, x[:, i:]
        y[i : i + step, i:].addmm_(left, right, beta=beta, alpha=alpha)


def packed_numel(groups: int, d: int) -> int:
    """Elements of `groups` packed symmetric matrices of d rows."""
    return groups * d * (d + 1) // 2


def pack(full: Tensor, out: Tensor) -> Tensor:
    """The upper triangles of `full` [groups, d, d] into `out`, flat [packed_numel].

    One pass over the upper half; the lower is not read. `out` may be of another float
    type. Returns `out`.
    """
    for block, packed in _rectangles(full, out):
        packed.copy_(block)
    for blocks, packed in _diagonals(full, out):
        upper, _ = _places(blocks.shape[2], full.device)
        packed.copy_(blocks.flatten(2)[..., upper])
    return out


def unpack(flat: Tensor, out: Tensor) -> Tensor:
    """`pack` undone: `out` [groups, d, d] with both halves filled. Returns `out`."""
    for half in (out, out.mT):
        for block, packed in _rectangles(half, flat):
            block.copy_(packed)
    for blocks, packed in _diagonals(out, flat):
        _, both = _places(blocks.shape[2], out.device)
        blocks.copy_(packed[..., both].view(blocks.shape))
    return out


def traces(flat: Tensor, groups: int, d: int) -> Tensor:
    """The traces [groups] of packed matrices."""
    packed = flat.view(groups, -1)
    return packed[:, _diagonal(d, flat.device)].float().sum(1)


def _rectangles(full: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of what is right of each diagonal block, and of its place in `flat`."""
    groups, d, _ = full.shape
    place, packed = 0, flat.view(groups, -1)
    for begin in range(0, d, BLOCK):
        end = min(begin + BLOCK, d)
        block = full[:, begin:end, end:]
        length = (end - begin) * (d - end)
        yield block, packed[:, place : place + length].view(block.shape)
        place += length


def _diagonals(full: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views [groups, count, h, h] of the diagonal blocks, and of their places in `flat`
    [groups, count, h (h + 1) / 2]: the whole ones together, then what is left."""
    groups, d, _ = full.shape
    step, row, column = full.stride()
    whole, rest = divmod(d, BLOCK)
    packed = flat.view(groups, -1)[:, -_diagonal_numel(d) :]
    first, last = packed.tensor_split([whole * packed_numel(1, BLOCK)], 1)
    if whole:
        shape = (groups, whole, BLOCK, BLOCK)
        strides = (step, BLOCK * (row + column), row, column)
        blocks = full.as_strided(shape, strides, full.storage_offset())
        yield blocks, first.view(groups, whole, -1)
    if rest:
        yield full[:, None, d - rest :, d - rest :], last[:, None]


def _diagonal_numel(d: int) -> int:
    """Elements of the packed diagonal blocks, which come last."""
    whole, rest = divmod(d, BLOCK)
    return whole * packed_numel(1, BLOCK) + packed_numel(1, rest)


@lru_cache
def _places(h: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the upper triangle in a flat h x h matrix; of all elements in the triangle."""
    rows, columns = torch.triu_indices(h, h, device=device).unbind()
    square = torch.zeros(h, h, dtype=torch.long, device=device)
    square[rows, columns] = torch.arange(len(rows), device=device, dtype=torch.int64)
    return rows * h + columns, (square + square.triu(1).T).flatten()


@lru_cache
def _diagonal(d: int, device: torch.device) -> Tensor:
    """Places of the diagonal in a packed matrix."""
    place, places = packed_numel(1, d) - _diagonal_numel(d), []
    for begin in range(0, d, BLOCK):
        h = min(BLOCK, d - begin)
        places += [place + i * h - i * (i - 1) // 2 for i in range(h)]
        place += h * (h + 1) // 2
    return torch.tensor(places, device=device, dtype=torch.int64)
