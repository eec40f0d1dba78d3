"""Selection on a GPU: mark, then gather the marked; Triton kernels.

[Note: one pass] The entries come out in ascending order, so a block has to know how
many were selected before it. Waiting for that inside the kernel needs blocks that spin;
a second pass reads the bucket again. Instead, `_mark` leaves one bit for each element
and the number of ones of each block, and `_compact` works on these alone. For n
elements of four bytes, 4 n bytes are read, and n / 4 for writing and reading the bits.

Without Triton (`AVAILABLE` is false) nothing here can be called. Kernels run on the
current device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradtide.selectors.kernels import index_dtype

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for a GPU brings it along; others do well without it
    AVAILABLE = False
else:
    AVAILABLE = True

BLOCK = 4096  # elements of a program
# Fused multiply-adds change nothing here, and leaving them open warns since Triton 3.9.
_LAUNCH = {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}


def _kernel(function: Callable[..., None]) -> Any:
    return triton.jit(function) if AVAILABLE else function


def above(x: Tensor, threshold: float, limit: int) -> Tensor:
    """Sorted indices of the first `limit` entries with not(|x| <= threshold).

    `x` is 1-D and contiguous, n >= 1. NaN counts as large. Waits for the device once,
    to learn how many there are.
    """
    assert x.is_contiguous()
    blocks = triton.cdiv(x.numel(), BLOCK)
    bits = x.new_empty(blocks * BLOCK // 32, dtype=torch.int32)
    counts = x.new_empty(blocks, dtype=torch.int32)
    bound = x.new_full((), threshold, dtype=torch.promote_types(x.dtype, torch.float32))
    _mark[(blocks,)](x, bound, bits, counts, x.numel(), **_LAUNCH)
    ends = counts.cumsum(0, dtype=index_dtype(x.numel()))
    count = min(int(ends[-1]), limit)
    indices = torch.empty(count, dtype=ends.dtype, device=x.device)
    if count:
        _compact[(len(ends),)](bits, ends, indices, count, **_LAUNCH)
    return indices


@_kernel
def _mark(  # type: ignore[no-untyped-def]
    flat, threshold, bits, counts, n, BLOCK: tl.constexpr
):
    """A bit for each element above the threshold."""
    block = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK // 32)
    lane = tl.arange(0, 32)
    at = block * BLOCK + word[:, None] * 32 + lane[None, :]
    limit = tl.load(threshold)
    x = tl.load(flat + at, mask=at < n, other=0)
    small = tl.abs(x.to(limit.dtype)) <= limit
    large = ((small == 0) & (at < n)).to(tl.int32)
    tl.store(bits + block * (BLOCK // 32) + word, tl.sum(large << lane[None, :], 1))
    tl.store(counts + block, tl.sum(tl.sum(large, 1), 0))


@_kernel
def _compact(  # type: ignore[no-untyped-def]
    bits, ends, indices, capacity, BLOCK: tl.constexpr
):
    """Indices of marked entries to their places, as far as there is room."""
    block = tl.program_id(0).to(tl.int64)
    begin = tl.load(ends + block - 1, mask=block > 0, other=0)
    if (begin < capacity) & (begin < tl.load(ends + block)):
        word = tl.arange(0, BLOCK // 32)
        lane = tl.arange(0, 32)
        words = tl.load(bits + block * (BLOCK // 32) + word)
        ones = (words[:, None] >> lane[None, :]) & 1
        inside = tl.cumsum(ones, 1)
        total = tl.sum(ones, 1)
        before = begin + tl.cumsum(total, 0) - total
        place = before[:, None] + inside - 1
        at = block * BLOCK + word[:, None] * 32 + lane[None, :]
        mine = (ones == 1) & (place < capacity)
        tl.store(indices + place, at, mask=mine)
