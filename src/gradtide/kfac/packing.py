"""Symmetric matrices as flat tensors of d (d + 1) / 2 elements.

The order of the elements is this module's own: first the blocks of rows right of the
diagonal blocks, one after the other, then the upper triangles of the diagonal blocks.
Blocks are copied as rectangles, so that no index as long as the matrix is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 64  # rows; more => longer indices, fewer copies


def packed_numel(groups: int, d: int) -> int:
    """Elements of `groups` packed symmetric matrices of d rows."""
    return groups * d * (d + 1) // 2


def pack(full: Tensor, out: Tensor) -> Tensor:
    """The upper triangles of `full` [groups, d, d] into `out`, flat [packed_numel].

    One pass over the upper half; the lower is not read. `out` may be of another float
    type. Returns `out`.
    """
    groups, d, _ = full.shape
    flat = out.view(groups, -1)
    for (begin, end), place in _rectangles(d):
        block = full[:, begin:end, end:]
        flat[:, place : place + block[0].numel()].view(block.shape).copy_(block)
    for blocks, place in _diagonals(full):
        upper = _triangle(blocks.shape[2], full.device)
        length = blocks.shape[1] * len(upper)
        triangles = blocks.flatten(2)[..., upper]
        flat[:, place : place + length].copy_(triangles.flatten(1))
    return out


def unpack(flat: Tensor, out: Tensor) -> Tensor:
    """`pack` undone: `out` [groups, d, d] with both halves filled. Returns `out`."""
    groups, d, _ = out.shape
    packed = flat.view(groups, -1)
    for (begin, end), place in _rectangles(d):
        block = out[:, begin:end, end:]
        block.copy_(packed[:, place : place + block[0].numel()].view(block.shape))
        out[:, end:, begin:end].copy_(block.mT)
    for blocks, place in _diagonals(out):
        count, h = blocks.shape[1:3]
        both = _square(h, out.device)
        length = count * h * (h + 1) // 2
        triangles = packed[:, place : place + length].view(groups, count, -1)
        blocks.copy_(triangles[..., both].view(blocks.shape))
    return out


def traces(flat: Tensor, groups: int, d: int) -> Tensor:
    """The traces [groups] of packed matrices."""
    packed = flat.view(groups, -1)
    return packed[:, _diagonal(d, flat.device)].float().sum(1)


def _rectangles(d: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Rows (begin, end) of what is right of a diagonal block, and its place."""
    place = 0
    for begin in range(0, d, BLOCK):
        end = min(begin + BLOCK, d)
        yield (begin, end), place
        place += (end - begin) * (d - end)


def _diagonals(full: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Views [groups, count, h, h] of the diagonal blocks, and their places: the whole
    ones together, then what is left."""
    groups, d, _ = full.shape
    step, row, column = full.stride()
    whole, rest = divmod(d, BLOCK)
    place = sum((end - begin) * (d - end) for (begin, end), _ in _rectangles(d))
    if whole:
        shape = (groups, whole, BLOCK, BLOCK)
        strides = (step, BLOCK * (row + column), row, column)
        yield full.as_strided(shape, strides, full.storage_offset()), place
        place += whole * BLOCK * (BLOCK + 1) // 2
    if rest:
        yield full[:, None, d - rest :, d - rest :], place


@lru_cache
def _triangle(h: int, device: torch.device) -> Tensor:
    """Places of the upper triangle in a flat h x h matrix."""
    rows, columns = torch.triu_indices(h, h, device=device)
    upper: Tensor = rows * h + columns
    return upper


@lru_cache
def _square(h: int, device: torch.device) -> Tensor:
    """Places, in a packed triangle, of all elements of the h x h matrix."""
    places = torch.zeros(h, h, dtype=torch.long, device=device)
    rows, columns = torch.triu_indices(h, h, device=device)
    places[rows, columns] = torch.arange(len(rows), device=device)
    square: Tensor = places + places.triu(1).T
    return square.flatten()


@lru_cache
def _diagonal(d: int, device: torch.device) -> Tensor:
    """Places of the diagonal in a packed matrix."""
    place = sum((end - begin) * (d - end) for (begin, end), _ in _rectangles(d))
    places: list[int] = []
    for begin in range(0, d, BLOCK):
        h = min(BLOCK, d - begin)
        places += [place + i * h - i * (i - 1) // 2 for i in range(h)]
        place += h * (h + 1) // 2
    return torch.tensor(places, device=device)
