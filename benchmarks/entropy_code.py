"""A plain code of bf16 without loss, to see what it takes: for `entropy.py` alone.

Of a block of 256 values it has the largest exponent; a byte of sign and mantissa each;
three bits by how much an exponent is below the largest, in planes as in
`gradtide.wire.blocks`; and where these are 7, the exponent among the escapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

BLOCK = 256
MOST = 7  # below the largest: this stands for an escape
compiled: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy")


@compiled
def encode(blocks: Any, fixed: Any, escapes: Any) -> int:
    """Write blocks [blocks, 256] (uint16); returns the number of escapes."""
    lower = np.empty(BLOCK, np.uint8)
    number = 0
    for b in range(blocks.shape[0]):
        x, out = blocks[b], fixed[b]
        largest = np.uint16(0)
        for i in range(BLOCK):
            exponent = np.uint16((x[i] >> np.uint16(7)) & np.uint16(255))
            largest = exponent if exponent > largest else largest
        out[0] = np.uint8(largest)
        for i in range(BLOCK):
            sign = np.uint16((x[i] >> np.uint16(8)) & np.uint16(128))
            out[1 + i] = np.uint8(sign | (x[i] & np.uint16(127)))
        for i in range(BLOCK):
            exponent = np.uint16((x[i] >> np.uint16(7)) & np.uint16(255))
            below = np.uint16(largest - exponent)
            lower[i] = np.uint8(below if below < np.uint16(MOST) else np.uint16(MOST))
        for i in range(64):  # two bits, four values a byte
            a = lower[i] & 3 | (lower[64 + i] & 3) << 2
            c = (lower[128 + i] & 3) << 4 | (lower[192 + i] & 3) << 6
            out[257 + i] = np.uint8(a | c)
        for i in range(32):  # one bit, eight values a byte
            a = lower[i] >> 2 | lower[32 + i] >> 2 << 1
            c = lower[64 + i] >> 2 << 2 | lower[96 + i] >> 2 << 3
            d = lower[128 + i] >> 2 << 4 | lower[160 + i] >> 2 << 5
            e = lower[192 + i] >> 2 << 6 | lower[224 + i] >> 2 << 7
            out[321 + i] = np.uint8(a | c | d | e)
        for i in range(BLOCK):  # without a branch: what is no escape is written over
            escapes[min(number, escapes.size - 1)] = np.uint8((x[i] >> 7) & 255)
            number += lower[i] == MOST
    return number


@compiled
def decode(fixed: Any, escapes: Any, blocks: Any) -> None:
    """Write the blocks that were encoded."""
    lower = np.empty(BLOCK, np.uint8)
    number = 0
    for b in range(blocks.shape[0]):
        x, out = blocks[b], fixed[b]
        for p in range(4):
            for i in range(64):
                lower[64 * p + i] = np.uint8((out[257 + i] >> (2 * p)) & 3)
        for p in range(8):
            for i in range(32):
                lower[32 * p + i] |= np.uint8(((out[321 + i] >> p) & 1) << 2)
        largest, any_escape = np.uint16(out[0]), 0
        for i in range(BLOCK):
            exponent = np.uint16(largest - np.uint16(lower[i]))
            own = np.uint16(out[1 + i])
            sign = np.uint16((own & np.uint16(128)) << np.uint16(8))
            rest = np.uint16(own & np.uint16(127))
            x[i] = sign | np.uint16(exponent << np.uint16(7)) | rest
            any_escape += lower[i] == MOST
        if any_escape:
            for i in range(BLOCK):
                if lower[i] == MOST:
                    x[i] = np.uint16((x[i] & 0x807F) | np.uint16(escapes[number]) << 7)
                    number += 1
