"""The inputs that each output of a convolution saw, as rows of a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIECE = 1 << 24  # elements unfolded at once; more => fewer products, more memory


Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


def patches(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Rows [groups, positions, inputs of a group] of a convolution of any rank.

    `x` is [batch, channels, *size] or one unbatched sample. The inputs of a row are in
    the order of the weight's (channel, *kernel). Each piece is copied once, from a
    strided view of the padded input.
    """
    assert isinstance(module, Convolution)
    kernel: Any = module.kernel_size
    x = _padded(module, x if x.dim() == len(kernel) + 2 else x.unsqueeze(0))
    size = [
        (length - dilation * (k - 1) - 1) // stride + 1
        for length, dilation, k, stride in zip(
            x.shape[2:], module.dilation, kernel, module.stride, strict=True
        )
    ]
    inputs = module.in_channels * prod(kernel)
    batch = max(1, PIECE // max(1, inputs * prod(size)))
    dense = inputs == module.in_channels and module.groups == prod(module.stride) == 1
    for piece in torch.split(x, batch):
        last = piece.movedim(1, -1)
        if dense and last.is_contiguous():  # a 1x1 convolution's rows are there already
            yield last.view(1, -1, inputs)
            continue
        # A view [channels, *kernel, samples, *positions]: each offset's inputs.
        sample, channel, *steps = piece.stride()
        dilated = [n * step for n, step in zip(module.dilation, steps, strict=True)]
        strided = [n * step for n, step in zip(module.stride, steps, strict=True)]
        shape = (piece.shape[1], *kernel, piece.shape[0], *size)
        windows = piece.as_strided(shape, (channel, *dilated, sample, *strided))
        columns = windows.reshape(module.groups, inputs // module.groups, -1)
        yield columns.transpose(1, 2)


def _padded(module: Convolution, x: Tensor) -> Tensor:
    """`x` with the padding that the convolution adds, in its padding mode."""
    if module.padding == "valid":
        return x
    both: list[int] = []  # before and after, of the last dimension first
    for i in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[i] * (module.kernel_size[i] - 1)
            both += [total // 2, total - total // 2]
        else:
            both += [int(module.padding[i])] * 2
    if not any(both):
        return x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, both, mode)
