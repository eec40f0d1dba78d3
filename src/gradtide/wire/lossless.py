"""Values without loss in fewer bytes than they have, as many as their exponents need.

[Note: exponents] Signs and mantissas of gradients are as good as random, but exponents
of neighbours are alike: most are at most six below the largest of their block of 256.
So of each the difference travels, in three bits. From 7 on these are 7, and half a byte
stands apart: 0 to 13 is what the difference has above 7, 14 an exponent of zero, and 15
one that follows as it is, in a byte. ZipNN (Hershcovitch et al., 2024,
arXiv:2411.05239) sets exponents of weights apart likewise, and leaves them to Huffman.

[Note: planes of bits] In a plane of 32 bytes are the first, the second or the third
bits of a block's differences, those of elements in one byte that lie 32 apart: so a
vector of elements becomes a vector of bytes. What stands apart is in the order of these
bits.

A message begins with its length, the number of exponents that stand apart, and of those
in a byte (int64 each); the second is -1 where values travel as they are, because that
is no longer. Then come the second halves of float32, the blocks' largest exponents, the
planes, a byte for each value with its sign and what follows the exponent in its first
half, and what stands apart. What is compiled by numba writes the same bytes as torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradtide.core.kernels import Kernels

BLOCK, PLANE, PLANES = 256, 32, 96  # elements, bytes of a plane, and of all three
HEAD, ALIGN = 24, 8  # bytes
FAR, ZERO, OTHER = 7, 14, 15  # see [Note: exponents]
INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}  # looked at as
# Bytes that a value of gradients is shorter by: the median of five tasks
# (benchmarks/records/entropy_202611.json).
SHORTER = 0.59
# Of the buffer, that take as long as to encode it or to decode (ibid.); without numba
# it is so many times that.
COPIES, SLOWER = 3, 30


def _fast() -> Any:
    import gradtide.wire.fast_lossless as fast_lossless

    return fast_lossless


KERNELS = Kernels(
    _fast,
    "encoding without loss",
    "values are encoded by torch, which takes some thirty times as long",
)


class Message(NamedTuple):
    """What was written (1-D, uint8), wherever it is, and its head in host memory."""

    whole: Tensor
    head: Tensor


@dataclass(frozen=True)
class Lossless:
    """Messages (1-D, uint8) of `numel` values of a `dtype` that `INTEGERS` has."""

    dtype: torch.dtype
    numel: int

    @property
    def room(self) -> int:
        """Bytes that a message takes at the most."""
        return -(-(HEAD + self._whole) // ALIGN) * ALIGN

    @property
    def likely(self) -> int:
        """Bytes that a long message of gradients takes."""
        return HEAD + round(self.numel * (self.dtype.itemsize - SHORTER))

    def length(self, head: Tensor) -> int:
        """Bytes of the message that begins with a head in host memory.

        Without numbers it is what one of gradients is likely to have.
        """
        return self.likely if head.is_meta else _numbers(head)[0]

    def write(self, values: Tensor, message: Tensor) -> None:
        """Encode values (1-D, contiguous, of the dtype)."""
        if values.is_meta:
            for _ in range(_copies()):
                message[: self.numel].copy_(values)
            return
        begin, end = HEAD + sum(self._sizes), HEAD + self._whole
        numbers = end, -1, 0
        if begin < end:
            integers = values.view(INTEGERS[self.dtype])
            parts = torch.split(message[HEAD:begin], self._sizes)
            nibbles, others = self._encode(integers, *parts)
            rest = torch.cat([_packed(nibbles), others])
            if begin + len(rest) < end:
                numbers = begin + len(rest), len(nibbles), len(others)
                message[begin : numbers[0]].copy_(rest)
        if numbers[1] < 0:
            message[HEAD:end].copy_(values.view(torch.uint8))
        head = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        message[:HEAD].view(torch.int64).copy_(head)

    def read(self, heard: Message, out: Tensor) -> None:
        """Write the values of a message to `out` (1-D, contiguous, of the dtype).

        Raises ValueError for a head that cannot be.
        """
        message, head = heard
        if out.is_meta:
            for _ in range(_copies()):
                out.copy_(message[: self.numel])
            return
        length, apart, others = _numbers(head)
        if apart < 0:
            out.view(torch.uint8).copy_(message[HEAD : HEAD + self._whole])
            return
        sizes = [*self._sizes, -(-apart // 2), others]
        if others < 0 or length != HEAD + sum(sizes) or length > len(message):
            raise ValueError(
                f"no message of {self.numel} values: it says that it has {length} "
                f"bytes, and {apart} exponents that stand apart, {others} in a byte"
            )
        *parts, packed, whole = torch.split(message[HEAD:length], sizes)
        nibbles = torch.cat([packed & 15, packed >> 4])
        self._decode(parts, nibbles, whole, out.view(INTEGERS[self.dtype]))

    @property
    def _shift(self) -> int:
        """Bits of a value behind its first half."""
        return 8 * self.dtype.itemsize - 16

    @property
    def _whole(self) -> int:
        """Bytes of values as they are."""
        return self.numel * self.dtype.itemsize

    @property
    def _sizes(self) -> list[int]:
        """Bytes of second halves, largest exponents, planes, and all else of values."""
        blocks = -(-self.numel // BLOCK)
        return [self._shift // 8 * self.numel, blocks, PLANES * blocks, self.numel]

    def _encode(
        self, x: Tensor, tails: Tensor, largest: Tensor, planes: Tensor, low: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write to parts of a message; returns what stands apart, a byte each."""
        kernels = KERNELS.module() if x.is_cpu else None
        tails = tails.view(torch.int16)
        if kernels is not None:
            both = low.new_empty(2, BLOCK * len(largest)).unbind()
            arrays = (y.numpy() for y in (tails, largest, planes, low, *both))
            counts = kernels.encode(x.numpy(), self._shift, *arrays)
            nibbles, others = (y[:n] for y, n in zip(both, counts, strict=True))
            return nibbles, others
        if self._shift:
            tails.copy_(x)
        half = (x >> self._shift).to(torch.int32)
        low.copy_(half & 127 | half >> 8 & 128)
        exponents = half >> 7 & 255
        missing = BLOCK * len(largest) - self.numel
        exponents = torch.cat([exponents, exponents[-1:].expand(missing)])
        blocks = _in_order_of_bits(exponents)
        top = blocks.amax((1, 2), keepdim=True)
        largest.copy_(top.flatten())
        below = top - blocks
        codes = below.clamp(max=FAR)
        each = torch.arange(8, dtype=torch.int32, device=x.device)
        bits = [((codes >> bit & 1) << each).sum(2) for bit in range(3)]
        planes.copy_(torch.cat(bits, 1).flatten())
        there = codes == FAR
        far, exponents = below[there] - FAR, blocks[there]
        far = far.clamp(max=OTHER).masked_fill_(far >= ZERO, OTHER)
        far.masked_fill_((exponents == 0) & (far == OTHER), ZERO)
        others = exponents[far == OTHER]
        return far.to(torch.uint8), others.to(torch.uint8)

    def _decode(
        self, parts: Sequence[Tensor], nibbles: Tensor, others: Tensor, out: Tensor
    ) -> None:
        """Write what parts of a message stand for to `out` (integers)."""
        tails, largest, planes, low = parts
        tails = tails.view(torch.int16)
        kernels = KERNELS.module() if out.is_cpu else None
        if kernels is not None:
            both = tails, largest, planes, low, nibbles, others, out
            kernels.decode(self._shift, *(x.numpy() for x in both))
            return
        bits = planes.to(torch.int32).view(-1, 3, PLANE, 1)
        each = torch.arange(8, dtype=torch.int32, device=out.device)
        bits = bits >> each & 1  # [blocks, 3, 32, 8]
        codes = bits[:, 0] + 2 * bits[:, 1] + 4 * bits[:, 2]
        exponents = largest.to(torch.int32).view(-1, 1, 1) - codes
        there = codes == FAR
        far = nibbles[: int(there.sum())].to(torch.int32)
        found = exponents[there] - far
        found.masked_fill_(far == ZERO, 0)
        found[far == OTHER] = others.to(torch.int32)
        exponents[there] = found
        exponents = exponents.transpose(1, 2).flatten()[: self.numel]
        lower = low.to(torch.int32)
        half = (lower & 128) << 8 | exponents << 7 | lower & 127
        if self._shift:
            half = half << self._shift | tails.to(torch.int32) & 0xFFFF
        out.copy_(half)


def prepare(device: torch.device) -> None:
    """Have ready what encodes values on such a device."""
    if device.type != "cpu":
        return

    def all_of_it(_: Any) -> None:
        for dtype in INTEGERS:
            own = Lossless(dtype, 2 * BLOCK)
            values = torch.zeros(own.numel, dtype=dtype, device="cpu")
            message = torch.zeros(own.room, dtype=torch.uint8, device="cpu")
            own.write(values, message)
            own.read(Message(message, message[:HEAD]), values)

    KERNELS.prepare("lossless", all_of_it)


def _copies() -> int:
    """How many passes over memory take as long, for who counts them."""
    return COPIES if KERNELS.installed else COPIES * SLOWER


def _numbers(head: Tensor) -> list[int]:
    """A message's length, and how many exponents stand apart, and how many of them in
    a byte."""
    found: list[int] = head.contiguous().view(torch.int64).tolist()
    return found


def _packed(nibbles: Tensor) -> Tensor:
    """Two in a byte, that are half of all apart."""
    half = -(-len(nibbles) // 2)
    first, second = nibbles[:half], nibbles[half:]
    return first | F.pad(second, (0, half - len(second))) << 4


def _in_order_of_bits(x: Tensor) -> Tensor:
    """[blocks, 32, 8], see [Note: planes of bits]."""
    return x.view(-1, 8, PLANE).transpose(1, 2)
