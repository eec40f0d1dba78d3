"""Values to the bytes of `lossless` and back, compiled by numba: imported only there.

Loops over a block have constant bounds: LLVM makes vectors of them. What is rare is
found by the bits of words (guard: tests/wire/test_lossless.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from gradtide.wire.fast import byte, compiled, part

BLOCK, PLANE, PLANES = 256, 32, 96  # elements, bytes of a plane, and of all three
FAR, ZERO, OTHER = np.int32(7), np.int32(14), np.int32(15)  # [Note: exponents]
ONE, SIGN, MANTISSA = np.int32(1), np.int32(128), np.int32(127)
TWO, SEVEN, EIGHT = np.int32(2), np.int32(7), np.int32(8)
LAST = np.int32(0xFFFF)  # bits of a second half


def _find(typing: Any, x: Any) -> Any:
    """The number of the lowest bit that is set, where one is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


_first: Any = intrinsic(_find)


@part
def _place(word: Any, bit: Any) -> Any:
    """Of what element of a block a bit is."""
    return 8 * word + (bit >> 3) + PLANE * (bit & 7)


@part
def _bit(planes: Any, b: Any, i: Any, p: Any) -> Any:
    return np.int32(np.int32(planes[b, i]) >> np.int32(p)) & ONE


@part
def _encode(
    x: Any,
    b: Any,
    shift: Any,
    largest: Any,
    planes: Any,
    low: Any,
    masks: Any,
    exponents: Any,
) -> None:
    """A block: differences, and what is beside exponents.

    `masks` gets a bit for each exponent that stands apart, and `exponents` all of them.
    """
    most = np.uint8(0)
    for i in range(BLOCK):
        bits = np.int32(np.int32(x[b, i]) >> np.int32(shift))
        sign = np.int32(np.int32(bits >> EIGHT) & SIGN)
        low[b, i] = byte(np.int32(np.int32(bits & MANTISSA) | sign))
        exponent = byte(np.int32(bits >> SEVEN))
        exponents[i] = exponent
        most = exponent if exponent > most else most
    largest[b], top = most, np.int32(most)
    for i in range(PLANE):
        zero, one, two = np.int32(0), np.int32(0), np.int32(0)
        for p in range(8):
            below = np.int32(top - np.int32(exponents[PLANE * p + i]))
            below = below if below < FAR else FAR
            zero |= np.int32(np.int32(below & ONE) << np.int32(p))
            one |= np.int32(np.int32(np.int32(below >> ONE) & ONE) << np.int32(p))
            two |= np.int32(np.int32(below >> TWO) << np.int32(p))
        planes[b, i] = byte(zero)
        planes[b, PLANE + i] = byte(one)
        planes[b, 2 * PLANE + i] = byte(two)
        masks[i] = byte(np.int32(np.int32(zero & one) & two))


@part
def _set_apart(
    top: Any,
    words: Any,
    exponents: Any,
    nibbles: Any,
    others: Any,
    at: Any,
    behind: Any,
) -> Any:
    """Write a block's exponents that stand apart; returns where the next ones go."""
    for w in range(words.size):
        mask = words[w]
        while mask != 0:
            exponent = exponents[_place(w, _first(mask))]
            mask &= mask - np.uint64(1)
            below = top - np.int32(exponent) - FAR
            if below < ZERO:
                nibbles[at] = np.uint8(below)
            elif exponent == 0:
                nibbles[at] = np.uint8(ZERO)
            else:
                nibbles[at] = np.uint8(OTHER)
                others[behind] = exponent
                behind += 1
            at += 1
    return at, behind


@compiled
def encode(
    x: Any,
    shift: Any,
    tails: Any,
    largest: Any,
    planes: Any,
    low: Any,
    nibbles: Any,
    others: Any,
) -> Any:
    """Write `x` (integers) to parts of a message.

    `shift` bits, 0 or 16, are behind the first 16 of each. Returns how many exponents
    stand apart, each a byte of `nibbles`, and how many of them are in `others`.
    """
    whole, at, behind = x.size // BLOCK, 0, 0
    masks, exponents = np.empty(PLANE, np.uint8), np.empty(BLOCK, np.uint8)
    words = masks.view(np.uint64)
    blocks = x[: whole * BLOCK].reshape(-1, BLOCK)
    bits, rows = low[: whole * BLOCK].reshape(-1, BLOCK), planes.reshape(-1, PLANES)
    for i in range(tails.size):
        tails[i] = x[i]
    for b in range(whole):
        _encode(blocks, b, shift, largest, rows, bits, masks, exponents)
        top = np.int32(largest[b])
        at, behind = _set_apart(top, words, exponents, nibbles, others, at, behind)
    short = x.size - whole * BLOCK
    if short > 0:
        block, its = np.empty((1, BLOCK), x.dtype), np.empty((1, BLOCK), np.uint8)
        block[0, :] = x[x.size - 1]
        block[0, :short] = x[whole * BLOCK :]
        _encode(block, 0, shift, largest[whole:], rows[whole:], its, masks, exponents)
        low[whole * BLOCK :] = its[0, :short]
        top = np.int32(largest[whole])
        at, behind = _set_apart(top, words, exponents, nibbles, others, at, behind)
    return at, behind


@part
def _exponents(b: Any, largest: Any, planes: Any, masks: Any, exponents: Any) -> None:
    """A block's, but for those that stand apart, and a bit for each of these."""
    top = np.int32(largest[b])
    for i in range(PLANE):
        both = np.int32(np.int32(planes[b, i]) & np.int32(planes[b, PLANE + i]))
        masks[i] = byte(np.int32(both & np.int32(planes[b, 2 * PLANE + i])))
    for p in range(8):
        for i in range(PLANE):
            below = np.int32(_bit(planes, b, i, p))
            below += np.int32(_bit(planes, b, PLANE + i, p) << ONE)
            below += np.int32(_bit(planes, b, 2 * PLANE + i, p) << TWO)
            exponents[PLANE * p + i] = byte(np.int32(top - below))


@part
def _put_back(
    top: Any,
    words: Any,
    exponents: Any,
    nibbles: Any,
    others: Any,
    at: Any,
    behind: Any,
) -> Any:
    """`_set_apart`, undone."""
    for w in range(words.size):
        mask = words[w]
        while mask != 0 and at < nibbles.size:
            place = _place(w, _first(mask))
            mask &= mask - np.uint64(1)
            below = np.int32(nibbles[at])
            if below < ZERO:
                exponents[place] = byte(np.int32(top - FAR - below))
            elif below == ZERO:
                exponents[place] = np.uint8(0)
            elif behind < others.size:
                exponents[place] = others[behind]
                behind += 1
            at += 1
    return at, behind


@part
def _half(low: Any, exponent: Any) -> Any:
    """The first 16 bits of a value."""
    sign = np.int32(np.int32(low & SIGN) << EIGHT)
    rest = np.int32(np.int32(exponent << SEVEN) | np.int32(low & MANTISSA))
    return np.int32(sign | rest)


@compiled
def decode(
    shift: Any,
    tails: Any,
    largest: Any,
    planes: Any,
    low: Any,
    nibbles: Any,
    others: Any,
    out: Any,
) -> None:
    """Write the values that the parts of a message stand for to `out` (integers)."""
    whole, at, behind = out.size // BLOCK, 0, 0
    masks, exponents = np.empty(PLANE, np.uint8), np.empty(BLOCK, np.uint8)
    words = masks.view(np.uint64)
    blocks = out[: whole * BLOCK].reshape(-1, BLOCK)
    bits, rows = low[: whole * BLOCK].reshape(-1, BLOCK), planes.reshape(-1, PLANES)
    for b in range(whole):
        _exponents(b, largest, rows, masks, exponents)
        top = np.int32(largest[b])
        at, behind = _put_back(top, words, exponents, nibbles, others, at, behind)
        for i in range(BLOCK):
            half = _half(np.int32(bits[b, i]), np.int32(exponents[i]))
            blocks[b, i] = np.int32(half << np.int32(shift))
    short = out.size - whole * BLOCK
    if short > 0:
        _exponents(whole, largest, rows, masks, exponents)
        top = np.int32(largest[whole])
        _put_back(top, words, exponents, nibbles, others, at, behind)
        for i in range(short):
            half = _half(np.int32(low[whole * BLOCK + i]), np.int32(exponents[i]))
            out[whole * BLOCK + i] = np.int32(half << np.int32(shift))
    for i in range(tails.size):
        out[i] |= np.int32(tails[i]) & LAST
