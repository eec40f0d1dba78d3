"""Selection on a GPU: accumulate, mark, take out; Triton kernels.

[Note: one pass] The entries come out in ascending order, so a block has to know how
many were selected before it. Waiting for that inside the kernel needs blocks that spin;
a second pass reads the bucket again. Instead, `_mark` leaves one bit for each element
and the number of ones of each block, and `_compact` works on these: of the bucket it
touches only the selected entries. For n elements of four bytes, 12 n bytes are moved,
as by `flat += grad` alone, and n / 4 for writing and reading the bits.

Shapes follow from n and the capacity alone and nothing waits for the device, except in
`above`, whose result is as long as what was found. Triton is optional: without it
(`AVAILABLE` is false) nothing here can be called. Kernels run on the current device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradtide.select.kernels import index_dtype

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


def above(x: Tensor, threshold: Tensor | float, limit: int) -> Tensor:
    """Sorted indices of the first `limit` entries with not(|x| <= threshold).

    `x` is 1-D and contiguous, n >= 1; `threshold` a number, or a 0-dim tensor on its
    device. NaN counts as large. Waits for the device once, to learn how many there are.
    """
    bits, ends = _marked(x, None, threshold)
    count = min(int(ends[-1]), limit)
    indices = torch.empty(count, dtype=ends.dtype, device=x.device)
    _compacted(x, bits, ends, indices, None)
    return indices


def accumulate_select(
    flat: Tensor, grad: Tensor, threshold: Tensor | float, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Add `grad` to `flat`, and take out the entries with not(|flat| <= threshold).

    Both are 1-D and contiguous, n >= 1; `threshold` is a number, or a 0-dim tensor on
    their device. Sums are rounded to the dtype of `flat` before they are compared; NaN
    counts as large. Returns indices (ascending) and values, both of length `capacity`,
    and how many of these are entries (0-dim, still on the device). The rest is padding:
    index n, value 0. The first `capacity` entries are cleared in `flat`, any others
    stay there.
    """
    bits, ends = _marked(flat, grad, threshold)
    n = flat.numel()
    indices = torch.full((capacity,), n, dtype=ends.dtype, device=flat.device)
    values = flat.new_zeros(capacity)
    _compacted(flat, bits, ends, indices, values)
    return indices, values, ends[-1].clamp(max=capacity)


def _marked(
    flat: Tensor, grad: Tensor | None, threshold: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Bits of the entries above (int32 words), and ones up to each block's end."""
    assert flat.is_contiguous()
    assert grad is None or grad.is_contiguous()
    blocks = triton.cdiv(flat.numel(), BLOCK)
    bits = flat.new_empty(blocks * BLOCK // 32, dtype=torch.int32)
    counts = flat.new_empty(blocks, dtype=torch.int32)
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    limit = flat.new_empty((), dtype=wide)
    limit.copy_(threshold) if isinstance(threshold, Tensor) else limit.fill_(threshold)
    _mark[(blocks,)](
        flat,
        flat if grad is None else grad,
        limit,
        bits,
        counts,
        flat.numel(),
        ADD=grad is not None,
        **_LAUNCH,
    )
    return bits, counts.cumsum(0, dtype=index_dtype(flat.numel()))


def _compacted(
    flat: Tensor, bits: Tensor, ends: Tensor, indices: Tensor, values: Tensor | None
) -> None:
    """Write the marked entries' indices; with `values`, move them there as well."""
    if len(indices):
        _compact[(len(ends),)](
            flat,
            bits,
            ends,
            indices,
            flat if values is None else values,
            len(indices),
            TAKE=values is not None,
            **_LAUNCH,
        )


@_kernel
def _mark(  # type: ignore[no-untyped-def]
    flat, grad, threshold, bits, counts, n, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """A bit for each element above the threshold, after the addition if ADD."""
    block = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK // 32)
    lane = tl.arange(0, 32)
    at = block * BLOCK + word[:, None] * 32 + lane[None, :]
    limit = tl.load(threshold)
    x = tl.load(flat + at, mask=at < n, other=0)
    if ADD:
        more = tl.load(grad + at, mask=at < n, other=0)
        x = (x.to(limit.dtype) + more.to(limit.dtype)).to(x.dtype)
        tl.store(flat + at, x, mask=at < n)
    small = tl.abs(x.to(limit.dtype)) <= limit
    large = ((small == 0) & (at < n)).to(tl.int32)
    tl.store(bits + block * (BLOCK // 32) + word, tl.sum(large << lane[None, :], 1))
    tl.store(counts + block, tl.sum(tl.sum(large, 1), 0))


@_kernel
def _compact(  # type: ignore[no-untyped-def]
    flat,
    bits,
    ends,
    indices,
    values,
    capacity,
    TAKE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Marked entries to their places; those beyond the capacity are left alone."""
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
        if TAKE:
            x = tl.load(flat + at, mask=mine)
            tl.store(values + place, x, mask=mine)
            tl.store(flat + at, tl.zeros_like(x), mask=mine)
