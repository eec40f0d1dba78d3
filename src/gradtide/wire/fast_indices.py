"""Sorted indices to bytes and back, compiled by numba: imported only by `indices`.

The bytes are those of `indices` (guard: tests/wire/test_indices.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, error_model="numpy")


@compiled
def encode(where: Any, lower: Any, upper: Any, low: Any) -> None:
    """Write `where` (int32): the `low` bits of each to `lower`, and ones to `upper`."""
    upper[:] = 0
    mask = (1 << low) - 1
    bits, number, at = 0, 0, 0  # bits that are not written yet, and how many
    for i in range(where.size):
        index = np.int64(where[i])
        place = (index >> low) + i
        upper[place >> 3] |= np.uint8(1 << (place & 7))
        bits |= (index & mask) << number
        number += low
        while number >= 8:
            lower[at] = np.uint8(bits & 255)
            bits >>= 8
            number -= 8
            at += 1
    while at < lower.size:
        lower[at] = np.uint8(bits & 255)
        bits >>= 8
        at += 1


@compiled
def decode(lower: Any, upper: Any, low: Any, where: Any) -> None:
    """Write the first indices of a message to `where` (int32).

    For ones that are missing the end of `upper` stands, as in `indices.first_ones`.
    """
    i = 0
    for byte in range(upper.size if where.size else 0):
        ones = np.int64(upper[byte])
        for bit in range(8):  # written over until its one is there: without a branch
            where[i] = np.int32((8 * byte + bit - i) << low)
            i += (ones >> bit) & 1
            if i == where.size:
                break
        if i == where.size:
            break
    for missing in range(i, where.size):
        where[missing] = np.int32((8 * upper.size - missing) << low)
    mask = (1 << low) - 1
    bits, number, at = 0, 0, 0  # bits that were read, and how many
    for i in range(where.size):
        while number < low:
            bits |= np.int64(lower[at]) << number
            number += 8
            at += 1
        where[i] |= np.int32(bits & mask)
        bits >>= low
        number -= low
