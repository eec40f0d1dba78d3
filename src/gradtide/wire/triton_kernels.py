"""Blocks of values to codes and back on a GPU: Triton kernels, imported by `tools`.

What is computed is that of `formats`, bit for bit (guard:
tests/wire/test_wire_triton_kernels.py). So products and sums are not fused, divisions
are IEEE's, and means are rounded in whole numbers. `kind` is a format, as in `fast`.

[Note: bytes] A program reads its blocks once and has all of them in registers: for
values of four bytes, `encode` reads 4 and writes 4 bytes an element and the message,
`add` reads the messages and 4 bytes and writes 4, or only writes them where what was
there is forgotten. `cast` reads 4 and writes 6. The host waits for nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradtide.core.kernels import on_device_of

INT8, E3M0, SIGN, TWO = (tl.constexpr(kind) for kind in range(4))  # formats
BLOCK = tl.constexpr(256)  # elements
INFINITE = tl.constexpr(0x7F800000)  # bits of a float32 from which on it is not finite
TINY = tl.constexpr(0x0D800000)  # bits of 2^-100
UNSIGNED = tl.constexpr(0x7FFFFFFF)
MAGIC = tl.constexpr(1.5 * 2**23)  # what is added to it is rounded to a whole number
OCTAVES = tl.constexpr(8 * 2**0.5)
ROWS = 4  # blocks of a program
SPAN = 1024  # elements of a program that casts
_LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}
_CAST = {**_LAUNCH, "num_warps": 4}
_WIDE = {torch.float64: tl.float64}  # in what is added up; else in single precision


def encode(
    kind: int, plane: int, num_levels: int, values: Tensor, message: Tensor
) -> None:
    """Write `values` (1-D) to a message (uint8); what that does not hold stays there.

    `plane` is the number of bytes of a block, and `num_levels` that of its levels.
    """
    assert values.is_contiguous()
    if not values.numel():
        return
    begin = 4 * num_levels * -(-values.numel() // BLOCK.value)
    levels, codes = message[:begin].view(torch.float32), message[begin:]
    with on_device_of(values):
        _encode[_programs(values)](
            values, levels, codes, values.numel(), kind, plane, ROWS, **_LAUNCH
        )


def add(
    kind: int, plane: int, num_levels: int, messages: Tensor, out: Tensor, fresh: bool
) -> None:
    """Add what messages (the rows of a matrix, uint8) stand for to `out` (1-D).

    What was in `out` is forgotten if it is `fresh`, and what is too large for it then
    is its largest number.
    """
    assert out.is_contiguous()
    assert messages.stride(-1) == 1
    if not out.numel():
        return
    begin = 4 * num_levels * -(-out.numel() // BLOCK.value)
    codes = messages[:, begin:]
    most = torch.finfo(out.dtype).max if fresh and out.itemsize < 4 else 0.0
    with on_device_of(out):
        _add[_programs(out)](
            *(messages[:, :begin].view(torch.float32), codes, out, out.numel()),
            *(len(messages), messages.stride(0), kind, plane, fresh, most),
            *(_WIDE.get(out.dtype, tl.float32), ROWS),
            **_LAUNCH,
        )


def cast(values: Tensor, sent: Tensor) -> None:
    """Write `values` (1-D) to `sent`, of another dtype; what is rounded off stays.

    Where what is sent is not finite, nothing stays.
    """
    assert values.is_contiguous()
    n = values.numel()
    if n:
        with on_device_of(values):
            _cast[(triton.cdiv(n, SPAN),)](values, sent, n, SPAN, **_CAST)


def _programs(values: Tensor) -> tuple[int]:
    """So many for the whole blocks, and one for a short one."""
    whole, short = divmod(values.numel(), BLOCK.value)
    return (triton.cdiv(whole, ROWS) + (short > 0),)


# - One block --------------------------------------------------------------------------
# Values are [blocks, planes, elements of a plane], magnitudes and codes likewise, and
# what there is one of for each block is [blocks, 1, 1].


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _sum(x):
    """Of each block."""
    return tl.sum(tl.sum(x, 2), 1)[:, None, None]


@triton.jit
def _mean(total, count, grid):
    """The mean of whole numbers, to the nearest (or even) one, and off the grid."""
    mean = total // count
    twice = 2 * (total - mean * count)
    up = (twice > count) | ((twice == count) & ((mean & 1) == 1))
    return tl.div_rn((mean + up.to(tl.int32)).to(tl.float32), grid)


@triton.jit
def _value(codes, low, high, KIND: tl.constexpr):
    """What codes (int32) stand for, whatever bits are above theirs: float32."""
    if KIND == INT8:
        return (codes - ((codes & 0x80) << 1)).to(tl.float32) * low
    elif KIND == E3M0:
        level = codes & 7
        power = tl.where(level > 0, _float((level + 120) << 23), 0.0)
        return _float(_bits(power * low) | ((codes >> 3) << 31))
    elif KIND == SIGN:
        return _float(_bits(low) | (codes << 31))
    else:
        size = tl.where((codes & 1) == 1, high, low)
        return _float(_bits(size) | ((codes >> 1) << 31))


@triton.jit
def _levels(x, most, count, KIND: tl.constexpr):
    """The smallest and the largest level of blocks."""
    if KIND == INT8:
        exact = _bits(tl.div_rn(most, 127.0))
        scale = _float((exact + 0xFFF) & ~0xFFF)
        return scale, scale
    elif KIND == E3M0:
        return most, most
    else:
        grid = _float((275 - (_bits(most) >> 23)) << 23)
        sizes = (tl.abs(x) * grid).to(tl.int32)
        total = _sum(sizes)
        if KIND == SIGN:
            mean = _mean(total, count, grid)
            return mean, mean
        else:
            large = sizes >= (total + count - 1) // count
            above, number = _sum(tl.where(large, sizes, 0)), _sum(large.to(tl.int32))
            rest = tl.maximum(count - number, 1)
            low = _mean(total - above, rest, grid)
            return low, _mean(above, tl.maximum(number, 1), grid)


@triton.jit
def _code(x, low, high, KIND: tl.constexpr):
    """The codes (int32) of `x`."""
    sign = (_bits(x) >> 31) & 1
    if KIND == INT8:
        return _bits(x * tl.div_rn(1.0, low) + MAGIC) & 0xFF
    elif KIND == E3M0:
        ratio = tl.abs(x) * tl.div_rn(OCTAVES, low)
        return tl.maximum((_bits(ratio) >> 23) - 123, 0) | (sign << 3)
    elif KIND == SIGN:
        return sign
    else:
        return (tl.abs(x) >= (low + high) * 0.5).to(tl.int32) | (sign << 1)


@triton.jit
def _places(block, there, width, count, PLANE: tl.constexpr):
    """Where elements of blocks are, and which of them there are.

    Blocks have planes of `width` elements and `count` elements in all.
    """
    plane = tl.arange(0, BLOCK // PLANE)[None, :, None]
    at = tl.arange(0, PLANE)[None, None, :]
    inside = plane * width + at
    there = there[:, None, None] & (at < width) & (inside < count)
    return block[:, None, None] * BLOCK + inside, there


@triton.jit
def _encode_blocks(
    x,
    levels,
    codes,
    block,
    there,
    width,
    count,
    KIND: tl.constexpr,
    PLANE: tl.constexpr,
):
    at, mine = _places(block, there, width, count, PLANE)
    own = tl.load(x + at, mask=mine, other=0)
    narrow = own.to(tl.float32)
    size = _bits(narrow) & UNSIGNED
    most = tl.max(tl.max(size, 2), 1)[:, None, None]
    finite = most < INFINITE
    usual = finite & (most >= TINY)
    # Any magnitude will do where levels are not found by it.
    known = tl.where(usual, narrow, 1.0)
    low, high = _levels(known, tl.where(usual, _float(most), 1.0), count, KIND)
    usual = usual & (_bits(high) >= TINY)
    code = tl.where(usual, _code(known, low, high, KIND), 0)
    low, high = tl.where(usual, low, 0.0), tl.where(usual, high, 0.0)
    rest = own - _value(code, low, high, KIND)
    rest = tl.where(finite, rest, tl.where(size < INFINITE, own, 0))
    tl.store(x + at, rest, mask=mine)
    if KIND == TWO:
        place = levels + 2 * block[:, None, None]
        tl.store(place + 1, tl.where(finite, high, float("nan")), there[:, None, None])
    else:
        place = levels + block[:, None, None]
    tl.store(place, tl.where(finite, low, float("nan")), there[:, None, None])
    shift = tl.arange(0, BLOCK // PLANE)[None, :, None] * (8 * PLANE // BLOCK)
    byte = tl.arange(0, PLANE)[None, :]
    packed = tl.sum(code << shift, 1).to(tl.uint8)
    room = there[:, None] & (byte < width)
    # Codes begin at multiples of 4 bytes: so four of them are written at once.
    place = tl.multiple_of(codes + block[:, None] * PLANE + byte, [1, 4])
    tl.store(place, packed, mask=room)


@triton.jit
def _add_blocks(
    levels,
    codes,
    x,
    rows,
    stride,
    block,
    there,
    width,
    count,
    KIND: tl.constexpr,
    PLANE: tl.constexpr,
    FRESH: tl.constexpr,
    MOST: tl.constexpr,
    WIDE: tl.constexpr,
):
    at, mine = _places(block, there, width, count, PLANE)
    shift = tl.arange(0, BLOCK // PLANE)[None, :, None] * (8 * PLANE // BLOCK)
    byte = tl.arange(0, PLANE)[None, :]
    room = there[:, None] & (byte < width)
    if FRESH:
        total = tl.zeros(at.shape, WIDE)
    else:
        total = tl.load(x + at, mask=mine, other=0).to(WIDE)
    for row in range(rows):
        place = codes + row * stride + block[:, None] * PLANE + byte
        packed = tl.load(tl.multiple_of(place, [1, 4]), mask=room, other=0)
        code = packed.to(tl.int32)[:, None, :] >> shift
        here = levels + row * (stride // 4)
        known = there[:, None, None]
        if KIND == TWO:
            low = tl.load(here + 2 * block[:, None, None], mask=known, other=0)
            high = tl.load(here + 2 * block[:, None, None] + 1, mask=known, other=0)
        else:
            low = tl.load(here + block[:, None, None], mask=known, other=0)
            high = low
        total += _value(code, low, high, KIND).to(WIDE)
    if MOST > 0:
        # Not by a minimum: NaN stays.
        total = tl.where(total > MOST, MOST, total)
        total = tl.where(total < -MOST, -MOST, total)
    tl.store(x + at, total, mask=mine)


# - All of them ------------------------------------------------------------------------
# A whole block's planes have a length that is known when this is compiled: so the short
# one at the end, which is a program of its own, is a branch.


@triton.jit
def _short(n, PLANE: tl.constexpr):
    """The number of the short block, the length of its planes, and its elements."""
    whole, count = n // BLOCK, n % BLOCK
    last = whole + tl.arange(0, 1).to(tl.int64)
    return last, (count * PLANE + BLOCK - 1) // BLOCK, count


@triton.jit(do_not_specialize=["levels", "codes", "n"])
def _encode(
    x, levels, codes, n, KIND: tl.constexpr, PLANE: tl.constexpr, ROWS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0).to(tl.int64) * ROWS < n // BLOCK:
        there = block < n // BLOCK
        _encode_blocks(x, levels, codes, block, there, PLANE, BLOCK, KIND, PLANE)
    else:
        last, width, count = _short(n, PLANE)
        _encode_blocks(x, levels, codes, last, last >= 0, width, count, KIND, PLANE)


@triton.jit(do_not_specialize=["levels", "codes", "n", "rows", "stride"])
def _add(
    levels,
    codes,
    x,
    n,
    rows,
    stride,
    KIND: tl.constexpr,
    PLANE: tl.constexpr,
    FRESH: tl.constexpr,
    MOST: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0).to(tl.int64) * ROWS < n // BLOCK:
        _add_blocks(
            *(levels, codes, x, rows, stride, block, block < n // BLOCK),
            *(PLANE, BLOCK, KIND, PLANE, FRESH, MOST, WIDE),
        )
    else:
        last, width, count = _short(n, PLANE)
        _add_blocks(
            *(levels, codes, x, rows, stride, last, last >= 0),
            *(width, count, KIND, PLANE, FRESH, MOST, WIDE),
        )


@triton.jit(do_not_specialize=["n"])
def _cast(x, sent, n, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    if begin + SPAN <= n:
        _cast_span(x, sent, begin + tl.arange(0, SPAN), None)
    else:
        at = begin + tl.arange(0, SPAN)
        _cast_span(x, sent, at, at < n)


@triton.jit
def _cast_span(x, sent, at, there):
    own = tl.load(x + at, mask=there)
    # By way of single precision, as torch does it.
    narrow = own.to(tl.float32).to(sent.dtype.element_ty)
    rest = own - narrow.to(own.dtype)
    tl.store(sent + at, narrow, mask=there)
    finite = (_bits(narrow.to(tl.float32)) & UNSIGNED) < INFINITE
    tl.store(x + at, tl.where(finite, rest, 0), mask=there)
