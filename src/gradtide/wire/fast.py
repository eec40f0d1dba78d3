"""Blocks of values to codes and back, compiled by numba: imported only by `blocks`.

Loops have constant bounds, and no others to look after: LLVM makes vectors of them.
What is computed is that of `formats`, bit for bit (guard: tests/wire/test_blocks.py). A
format is a number here, INT8 and so on: numba cannot keep a compiled function that was
given another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

BLOCK = 256  # elements
GROUP = 8  # blocks that are looked through, then encoded: they stay in the first cache
INT8, E3M0, SIGN, TWO = range(4)  # formats
INFINITE = np.int32(0x7F800000)  # bits of a float32 from which on it is not finite
TINY = np.int32(0x0D800000)  # bits of 2^-100
UNSIGNED = np.int32(0x7FFFFFFF)
MAGIC = np.float32(1.5 * 2**23)  # what is added to it is rounded to a whole number
OCTAVES = np.float32(8 * 2**0.5)
compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, error_model="numpy")
part: Callable[..., Any] = numba.njit(error_model="numpy", inline="always")


def instruction(name: str, source: Any, target: Any) -> Any:
    """What takes a value of one type for another, by one instruction of LLVM."""

    def typed(typing: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            make = getattr(builder, name)
            return make(args[0], context.get_value_type(target))

        return target(source), generate

    return intrinsic(typed)


_bits = instruction("bitcast", types.float32, types.int32)
_float = instruction("bitcast", types.int32, types.float32)
byte = instruction("trunc", types.int32, types.uint8)  # the lowest eight bits


@compiled
def _magnitude(x: Any) -> Any:
    """The bits of |x|, as float32: they rank like the magnitudes, NaN above all."""
    return np.int32(_bits(np.float32(x)) & UNSIGNED)


# - One block --------------------------------------------------------------------------
# Values are [blocks, 256], levels [blocks, levels], codes [blocks, bytes]: a byte for
# each element of a plane, see `formats`. They come whole, with the number of a row, for
# numba counts references of slices. A short block is laid out like a whole one, zeros
# for what it lacks, and has `count` elements.


@part
def _fill(rows: Any, b: Any, value: Any) -> None:
    """Fill a row."""
    for i in range(rows.shape[1]):
        rows[b, i] = value


@part
def _encode_int8(x: Any, codes: Any, levels: Any, b: Any, most: Any) -> None:
    exact = np.float32(_float(most) / np.float32(127))
    scale = _float(np.int32((_bits(exact) + np.int32(0xFFF)) & np.int32(~0xFFF)))
    if _bits(scale) < TINY:
        _fill(codes, b, np.uint8(0))
        return
    inverse = np.float32(np.float32(1) / scale)
    levels[b, 0] = scale
    for i in range(BLOCK):
        moved = np.float32(np.float32(x[b, i]) * inverse) + MAGIC
        codes[b, i] = byte(_bits(moved))
        x[b, i] -= np.float32((moved - MAGIC) * scale)


@compiled
def _power(level: Any) -> Any:
    """2^(level - 7), or 0 for level 0."""
    there = np.int32(-(np.int32(level > 0)))
    return _float(np.int32(np.int32((level + np.int32(120)) << 23) & there))


@part
def _encode_e3m0(x: Any, codes: Any, levels: Any, b: Any, most: Any) -> None:
    scale = _float(most)
    inverse = np.float32(OCTAVES / scale)
    levels[b, 0] = scale
    for p in range(2):
        for i in range(128):
            value = np.float32(x[b, 128 * p + i])
            bits = _bits(value)
            ratio = np.float32(_float(np.int32(bits & UNSIGNED)) * inverse)
            level = np.int32((_bits(ratio) >> 23) - np.int32(123))
            level = level if level > np.int32(0) else np.int32(0)
            sign = np.int32((bits >> 31) & np.int32(1))
            codes[b, i] |= byte(np.int32((level | sign << 3) << (4 * p)))
            size = np.float32(_power(level) * scale)
            x[b, 128 * p + i] -= _float(np.int32(_bits(size) | np.int32(sign << 31)))


@compiled
def _grid(most: Any) -> Any:
    """By what magnitudes are multiplied to be whole numbers below 2^22."""
    return _float(np.int32((np.int32(275) - (most >> 23)) << 23))


@part
def _encode_sign(
    x: Any, codes: Any, levels: Any, b: Any, most: Any, count: Any
) -> None:
    grid = _grid(most)
    total = np.int32(0)
    for i in range(BLOCK):
        total += np.int32(np.float32(_float(_magnitude(x[b, i])) * grid))
    scale = np.float32(np.rint(total / count)) / grid
    if _bits(scale) < TINY:
        return
    levels[b, 0] = scale
    for p in range(8):
        for i in range(32):
            sign = np.int32((_bits(np.float32(x[b, 32 * p + i])) >> 31) & np.int32(1))
            codes[b, i] |= byte(np.int32(sign << p))
            x[b, 32 * p + i] -= _float(np.int32(_bits(scale) | np.int32(sign << 31)))


@part
def _encode_two(x: Any, codes: Any, levels: Any, b: Any, most: Any, count: Any) -> None:
    grid = _grid(most)
    total = np.int32(0)
    for i in range(BLOCK):
        total += np.int32(np.float32(_float(_magnitude(x[b, i])) * grid))
    least = np.int32((total + np.int32(count - 1)) // np.int32(count))
    above, num_above = np.int32(0), np.int32(0)
    for i in range(BLOCK):
        size = np.int32(np.float32(_float(_magnitude(x[b, i])) * grid))
        above += size if size >= least else np.int32(0)
        num_above += np.int32(size >= least)
    rest = max(count - num_above, 1)
    small = np.float32(np.rint((total - above) / rest)) / grid
    large = np.float32(np.rint(above / num_above)) / grid
    if _bits(large) < TINY:
        return
    levels[b, 0], levels[b, 1] = small, large
    middle = np.float32(np.float32(small + large) * np.float32(0.5))
    for p in range(4):
        for i in range(64):
            bits = _bits(np.float32(x[b, 64 * p + i]))
            big = np.int32(_float(np.int32(bits & UNSIGNED)) >= middle)
            sign = np.int32((bits >> 31) & np.int32(1))
            codes[b, i] |= byte(np.int32((big | sign << 1) << (2 * p)))
            value = large if big else small
            x[b, 64 * p + i] -= _float(np.int32(_bits(value) | np.int32(sign << 31)))


@part
def _most(x: Any, b: Any) -> Any:
    """The bits of the largest magnitude of a block."""
    most = np.int32(0)
    for i in range(BLOCK):
        size = _magnitude(x[b, i])
        most = size if size > most else most
    return most


@part
def _encode(
    kind: Any, x: Any, codes: Any, levels: Any, b: Any, most: Any, count: Any
) -> None:
    """Codes and levels of a block; what they do not hold stays in `x`."""
    usual = TINY <= most < INFINITE
    if kind != INT8 or not usual:
        _fill(codes, b, np.uint8(0))
    _fill(levels, b, np.float32(np.nan if most >= INFINITE else 0))
    if most >= INFINITE:
        for i in range(BLOCK):
            x[b, i] = x[b, i] if _magnitude(x[b, i]) < INFINITE else 0
    if not usual:
        return
    if kind == INT8:
        _encode_int8(x, codes, levels, b, most)
    elif kind == E3M0:
        _encode_e3m0(x, codes, levels, b, most)
    elif kind == SIGN:
        _encode_sign(x, codes, levels, b, most, count)
    else:
        _encode_two(x, codes, levels, b, most, count)


@part
def _add(kind: Any, x: Any, codes: Any, levels: Any, b: Any, fresh: Any) -> None:
    """Add what codes and levels stand for to a block, or to zeros if it is `fresh`."""
    low, high = levels[b, 0], levels[b, levels.shape[1] - 1]
    if fresh and kind != INT8:
        _fill(x, b, np.float32(0))
    if kind == INT8 and fresh:
        for i in range(BLOCK):
            x[b, i] = np.float32(np.float32(np.int32(np.int8(codes[b, i]))) * low)
    elif kind == INT8:
        for i in range(BLOCK):
            x[b, i] += np.float32(np.float32(np.int32(np.int8(codes[b, i]))) * low)
    elif kind == E3M0:
        for p in range(2):
            for i in range(128):
                code = np.int32(codes[b, i]) >> np.int32(4 * p)
                size = np.float32(_power(np.int32(code & np.int32(7))) * low)
                sign = np.int32((code & np.int32(8)) << 28)
                x[b, 128 * p + i] += _float(np.int32(_bits(size) | sign))
    elif kind == SIGN:
        for p in range(8):
            for i in range(32):
                sign = np.int32((np.int32(codes[b, i]) >> np.int32(p)) << 31)
                x[b, 32 * p + i] += _float(np.int32(_bits(low) | sign))
    else:
        for p in range(4):
            for i in range(64):
                code = np.int32(codes[b, i]) >> np.int32(2 * p)
                value = high if code & np.int32(1) else low
                sign = np.int32((code & np.int32(2)) << 30)
                x[b, 64 * p + i] += _float(np.int32(_bits(value) | sign))


# - All of them ------------------------------------------------------------------------


@compiled
def _spread(x: Any, block: Any, plane: Any, short: Any) -> None:
    """Lay a short block, whose planes are `short`, out in whole planes, and zeros."""
    block[:] = 0
    for i in range(x.size):
        block[i // short * plane + i % short] = x[i]


@compiled
def _gather(x: Any, block: Any, plane: Any, short: Any) -> None:
    """`_spread`, undone."""
    for i in range(x.size):
        x[i] = block[i // short * plane + i % short]


@compiled
def encode(kind: Any, plane: Any, num_levels: Any, x: Any, message: Any) -> None:
    """Write `x` (1-D) to a message (uint8); what that does not hold stays in `x`.

    `plane` is the number of bytes of a block, and `num_levels` that of its levels.
    """
    whole, short = x.size // BLOCK, x.size % BLOCK
    begin, end = 4 * num_levels * (whole + (short > 0)), whole * plane
    levels = message[:begin].view(np.float32).reshape(-1, num_levels)
    codes = message[begin : begin + end].reshape(-1, plane)
    values = x[: whole * BLOCK].reshape(-1, BLOCK)
    most = np.empty(GROUP, np.int32)
    for first in range(0, whole, GROUP):
        last = min(first + GROUP, whole)
        for b in range(first, last):
            most[b - first] = _most(values, b)
        for b in range(first, last):
            _encode(kind, values, codes, levels, b, most[b - first], BLOCK)
    if short > 0:
        own, block = x[whole * BLOCK :], np.empty((1, BLOCK), x.dtype)
        its, room = np.empty((1, plane), np.uint8), (short * plane + BLOCK - 1) // BLOCK
        _spread(own, block[0], plane, room)
        _encode(kind, block, its, levels[whole:], 0, _most(block, 0), short)
        _gather(own, block[0], plane, room)
        message[begin + end : begin + end + room] = its[0, :room]


@compiled
def add(
    kind: Any, plane: Any, num_levels: Any, messages: Any, out: Any, fresh: Any
) -> None:
    """Add what messages (the rows of a matrix, uint8) stand for to `out` (1-D).

    What was in `out` is forgotten if it is `fresh`.
    """
    whole, short = out.size // BLOCK, out.size % BLOCK
    begin, end = 4 * num_levels * (whole + (short > 0)), whole * plane
    values = out[: whole * BLOCK].reshape(-1, BLOCK)
    for first in range(0, whole, GROUP):
        for r in range(messages.shape[0]):
            levels = messages[r, :begin].view(np.float32).reshape(-1, num_levels)
            codes = messages[r, begin : begin + end].reshape(-1, plane)
            for b in range(first, min(first + GROUP, whole)):
                _add(kind, values, codes, levels, b, fresh and r == 0)
    if short > 0:
        own, block = out[whole * BLOCK :], np.empty((1, BLOCK), out.dtype)
        its, room = np.zeros((1, plane), np.uint8), (short * plane + BLOCK - 1) // BLOCK
        _spread(own, block[0], plane, room)
        for r in range(messages.shape[0]):
            levels = messages[r, :begin].view(np.float32).reshape(-1, num_levels)
            its[0, :room] = messages[r, begin + end : begin + end + room]
            _add(kind, block, its, levels[whole:], 0, fresh and r == 0)
        _gather(own, block[0], plane, room)
