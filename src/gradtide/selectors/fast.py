"""The scan of a bucket as one loop, compiled by numba: imported only by `kernels`.

64 elements a turn become one word with a bit for each that is large, and only the bits
that are set are looked at. LLVM makes the word with a few instructions, but only where
it is told to: as a loop in Python's syntax the same scan is slower than numpy.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

WIDTH = 64  # elements a turn: the bits of a word
AHEAD = 1 << 11  # elements: two pages, for the processor looks ahead within one
LINE = 64  # bytes
WORD = ir.IntType(WIDTH)


def _larger_bits(typing: Any, bits: Any, begin: Any, bound: Any) -> Any:
    """A word whose bit i says: bits[begin + i], without its sign, is above bound."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        scalar = args[2].type
        vector = ir.VectorType(scalar, WIDTH)
        address = builder.gep(array.data, [args[1]])
        values = builder.load(builder.bitcast(address, vector.as_pointer()))
        values.align = scalar.width // 8
        unsigned = ir.Constant(vector, [(1 << (scalar.width - 1)) - 1] * WIDTH)
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, args[2], ir.Constant(WORD, 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
        bounds = builder.shuffle_vector(first, undefined, lanes)
        large = builder.icmp_signed(">", builder.and_(values, unsigned), bounds)
        return builder.bitcast(large, WORD)

    return types.uint64(bits, types.int64, bits.dtype), generate


def _lowest_bit(typing: Any, word: Any) -> Any:
    """The place of the lowest bit that is set in a word (uint64, not 0)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _fetch_line(typing: Any, bits: Any, at: Any) -> Any:
    """Ask for the cache line of bits[at], which may be beyond the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(array.data, [args[1]]), byte)
        form = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], form)
        builder.call(prefetch, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(bits, types.int64), generate


_larger: Any = intrinsic(_larger_bits)
_fetch: Any = intrinsic(_fetch_line)
_lowest: Any = intrinsic(_lowest_bit)


@numba.njit(nogil=True, cache=True)
def compact(bits: Any, bound: Any, out: Any, found: Any) -> int:
    """Write where `bits`, without their sign, are above `bound`; returns how many.

    `bits` (int32 or int64, 1-D) are those of floats, `bound` is of the same dtype.
    Stops when `out` (int32, 1-D) is full. What is there is written to `found` (like
    `bits`, as long as `out`), unless it is None.
    """
    count, room = 0, out.size
    unsigned = bits.dtype.type(~(bits.dtype.type(1) << (bits.itemsize * 8 - 1)))
    whole = bits.size - bits.size % WIDTH
    for begin in range(0, whole, WIDTH):
        for line in range(0, WIDTH, LINE // bits.itemsize):
            _fetch(bits, begin + AHEAD + line)
        word = _larger(bits, begin, bound)
        while word:
            if count == room:
                return count
            at = begin + _lowest(word)
            out[count] = at
            if found is not None:
                found[count] = bits[at]
            count += 1
            word &= word - np.uint64(1)
    for i in range(whole, bits.size):
        if (bits[i] & unsigned) > bound:
            if count == room:
                return count
            out[count] = i
            if found is not None:
                found[count] = bits[i]
            count += 1
    return count
