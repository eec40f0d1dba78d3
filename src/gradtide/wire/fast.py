"""Blocks of values to codes and back, compiled by numba: imported only by `blocks`.

Loops run over slices: without bounds to look after, LLVM makes vectors of them. What is
computed is that of `formats`, bit for bit (guard: tests/wire/test_blocks.py). A format
is a number here, INT8 and so on: numba cannot keep a compiled function that was given
another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

BLOCK = 256  # elements
INT8, E3M0, SIGN, TWO = range(4)  # formats
INFINITE = np.int32(0x7F800000)  # bits of a float32 from which on it is not finite
TINY = np.int32(0x0D800000)  # bits of 2^-100
UNSIGNED = np.int32(0x7FFFFFFF)
MAGIC = np.float32(1.5 * 2**23)  # what is added to it is rounded to a whole number
OCTAVES = np.float32(8 * 2**0.5)
compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, error_model="numpy")


def _one(instruction: str, source: Any, target: Any) -> Any:
    """What takes a value of one type for another, by one instruction of LLVM."""

    def typed(typing: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            make = getattr(builder, instruction)
            return make(args[0], context.get_value_type(target))

        return target(source), generate

    return intrinsic(typed)


_bits = _one("bitcast", types.float32, types.int32)
_float = _one("bitcast", types.int32, types.float32)
_byte = _one("trunc", types.int32, types.uint8)  # the lowest eight bits


@compiled
def _magnitude(x: Any) -> Any:
    """The bits of |x|, as float32: they rank like the magnitudes, NaN above all."""
    return np.int32(_bits(np.float32(x)) & UNSIGNED)


# - One block --------------------------------------------------------------------------
# `codes` has a byte for every element of a plane, see `formats`; a short block `x` is
# laid out like a whole one, zeros for what it lacks, and has `count` elements.


@compiled
def _encode_int8(x: Any, codes: Any, levels: Any, most: Any) -> None:
    exact = np.float32(_float(most) / np.float32(127))
    scale = _float(np.int32((_bits(exact) + np.int32(0xFFF)) & np.int32(~0xFFF)))
    if _bits(scale) < TINY:
        return
    inverse = np.float32(np.float32(1) / scale)
    levels[0] = scale
    own = x[: codes.size]
    for i in range(own.size):
        moved = np.float32(np.float32(own[i]) * inverse) + MAGIC
        codes[i] = _byte(_bits(moved))
        own[i] -= np.float32((moved - MAGIC) * scale)


@compiled
def _power(level: Any) -> Any:
    """2^(level - 7), or 0 for level 0."""
    there = np.int32(-(np.int32(level > 0)))
    return _float(np.int32(np.int32((level + np.int32(120)) << 23) & there))


@compiled
def _encode_e3m0(x: Any, codes: Any, levels: Any, most: Any) -> None:
    scale = _float(most)
    inverse = np.float32(OCTAVES / scale)
    levels[0] = scale
    for p in range(2):
        own = x[p * 128 : p * 128 + codes.size]
        for i in range(own.size):
            value = np.float32(own[i])
            bits = _bits(value)
            ratio = np.float32(_float(np.int32(bits & UNSIGNED)) * inverse)
            level = np.int32((_bits(ratio) >> 23) - np.int32(123))
            level = level if level > np.int32(0) else np.int32(0)
            sign = np.int32((bits >> 31) & np.int32(1))
            codes[i] |= _byte(np.int32((level | sign << 3) << (4 * p)))
            size = np.float32(_power(level) * scale)
            own[i] -= _float(np.int32(_bits(size) | np.int32(sign << 31)))


@compiled
def _grid(most: Any) -> Any:
    """By what magnitudes are multiplied to be whole numbers below 2^22."""
    return _float(np.int32((np.int32(275) - (most >> 23)) << 23))


@compiled
def _encode_sign(x: Any, codes: Any, levels: Any, most: Any, count: Any) -> None:
    grid = _grid(most)
    total = np.int32(0)
    for i in range(x.size):
        total += np.int32(np.float32(_float(_magnitude(x[i])) * grid))
    scale = np.float32(np.rint(total / count)) / grid
    if _bits(scale) < TINY:
        return
    levels[0] = scale
    for p in range(8):
        own = x[p * 32 : p * 32 + codes.size]
        for i in range(own.size):
            sign = np.int32((_bits(np.float32(own[i])) >> 31) & np.int32(1))
            codes[i] |= _byte(np.int32(sign << p))
            own[i] -= _float(np.int32(_bits(scale) | np.int32(sign << 31)))


@compiled
def _encode_two(x: Any, codes: Any, levels: Any, most: Any, count: Any) -> None:
    grid = _grid(most)
    total = np.int32(0)
    for i in range(x.size):
        total += np.int32(np.float32(_float(_magnitude(x[i])) * grid))
    least = np.int32((total + np.int32(count - 1)) // np.int32(count))
    above, num_above = np.int32(0), np.int32(0)
    for i in range(x.size):
        size = np.int32(np.float32(_float(_magnitude(x[i])) * grid))
        above += size if size >= least else np.int32(0)
        num_above += np.int32(size >= least)
    rest = max(count - num_above, 1)
    small = np.float32(np.rint((total - above) / rest)) / grid
    large = np.float32(np.rint(above / num_above)) / grid
    if _bits(large) < TINY:
        return
    levels[0], levels[1] = small, large
    middle = np.float32(np.float32(small + large) * np.float32(0.5))
    for p in range(4):
        own = x[p * 64 : p * 64 + codes.size]
        for i in range(own.size):
            bits = _bits(np.float32(own[i]))
            big = np.int32(_float(np.int32(bits & UNSIGNED)) >= middle)
            sign = np.int32((bits >> 31) & np.int32(1))
            codes[i] |= _byte(np.int32((big | sign << 1) << (2 * p)))
            value = large if big else small
            own[i] -= _float(np.int32(_bits(value) | np.int32(sign << 31)))


@compiled
def _encode(kind: Any, x: Any, codes: Any, levels: Any, count: Any) -> None:
    """Codes and levels of a block; what they do not hold stays in `x`."""
    most = np.int32(0)
    for i in range(x.size):
        size = _magnitude(x[i])
        most = size if size > most else most
    codes[:], levels[:] = 0, 0
    if most < TINY:
        return
    if most >= INFINITE:
        levels[:] = np.nan
        for i in range(x.size):
            x[i] = x[i] if _magnitude(x[i]) < INFINITE else 0
    elif kind == INT8:
        _encode_int8(x, codes, levels, most)
    elif kind == E3M0:
        _encode_e3m0(x, codes, levels, most)
    elif kind == SIGN:
        _encode_sign(x, codes, levels, most, count)
    else:
        _encode_two(x, codes, levels, most, count)


@compiled
def _add(kind: Any, x: Any, codes: Any, levels: Any) -> None:
    """Add what codes and levels stand for to a block."""
    a, b = levels[0], levels[levels.size - 1]
    if kind == INT8:
        own, signed = x[: codes.size], codes.view(np.int8)
        for i in range(own.size):
            own[i] += np.float32(np.float32(np.int32(signed[i])) * a)
    elif kind == E3M0:
        for p in range(2):
            own = x[p * 128 : p * 128 + codes.size]
            for i in range(own.size):
                code = np.int32(codes[i]) >> np.int32(4 * p)
                size = np.float32(_power(np.int32(code & np.int32(7))) * a)
                sign = np.int32((code & np.int32(8)) << 28)
                own[i] += _float(np.int32(_bits(size) | sign))
    elif kind == SIGN:
        for p in range(8):
            own = x[p * 32 : p * 32 + codes.size]
            for i in range(own.size):
                sign = np.int32((np.int32(codes[i]) >> np.int32(p)) << 31)
                own[i] += _float(np.int32(_bits(a) | sign))
    else:
        for p in range(4):
            own = x[p * 64 : p * 64 + codes.size]
            for i in range(own.size):
                code = np.int32(codes[i]) >> np.int32(2 * p)
                value = b if code & np.int32(1) else a
                sign = np.int32((code & np.int32(2)) << 30)
                own[i] += _float(np.int32(_bits(value) | sign))


# - All of them ------------------------------------------------------------------------


@compiled
def _spread(x: Any, block: Any, plane: Any) -> None:
    """Lay a short block out in whole planes, and zeros."""
    block[:] = 0
    short = (x.size * plane + BLOCK - 1) // BLOCK
    for i in range(x.size):
        block[i // short * plane + i % short] = x[i]


@compiled
def _gather(x: Any, block: Any, plane: Any) -> None:
    """`_spread`, undone."""
    short = (x.size * plane + BLOCK - 1) // BLOCK
    for i in range(x.size):
        x[i] = block[i // short * plane + i % short]


@compiled
def encode(kind: Any, plane: Any, num_levels: Any, x: Any, message: Any) -> None:
    """Write `x` (1-D) to a message (uint8); what that does not hold stays in `x`.

    `plane` is the number of bytes of a block, and `num_levels` that of its levels.
    """
    blocks = (x.size + BLOCK - 1) // BLOCK
    begin = 4 * num_levels * blocks
    levels, codes = message[:begin].view(np.float32), message[begin:]
    for b in range(blocks):
        own = x[b * BLOCK : (b + 1) * BLOCK]
        short = (own.size * plane + BLOCK - 1) // BLOCK
        its = codes[b * plane : b * plane + short]
        fitted = levels[b * num_levels : (b + 1) * num_levels]
        if own.size == BLOCK:
            _encode(kind, own, its, fitted, BLOCK)
        else:
            block = np.empty(BLOCK, x.dtype)
            _spread(own, block, plane)
            _encode(kind, block, its, fitted, own.size)
            _gather(own, block, plane)


@compiled
def add(
    kind: Any, plane: Any, num_levels: Any, messages: Any, out: Any, fresh: Any
) -> None:
    """Add what messages (the rows of a matrix, uint8) stand for to `out` (1-D).

    What was in `out` is forgotten if it is `fresh`.
    """
    blocks = (out.size + BLOCK - 1) // BLOCK
    begin = 4 * num_levels * blocks
    room = np.empty(BLOCK, out.dtype)
    for b in range(blocks):
        own = out[b * BLOCK : (b + 1) * BLOCK]
        short = (own.size * plane + BLOCK - 1) // BLOCK
        block = own
        if fresh:
            own[:] = 0
        if own.size < BLOCK:
            block = room
            _spread(own, block, plane)
        for r in range(messages.shape[0]):
            message = messages[r]
            levels, codes = message[:begin].view(np.float32), message[begin:]
            fitted = levels[b * num_levels : (b + 1) * num_levels]
            _add(kind, block, codes[b * plane : b * plane + short], fitted)
        if own.size < BLOCK:
            _gather(own, block, plane)
