"""Coded parts of a mean of which few values are not zero: zeros do not travel.

[Note: zeros] A codec writes zero as a code without a bit that is set, if it has one at
all. So a message is shortened, whatever the wire, by leaving out such codes, and
indices of the others are sent beside them. How many there may be is known beforehand,
and so is the length. What a wire keeps beside its codes travels as it is: decoded are
the bits that the whole message stands for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradtide.collectives._entries import ALIGN
from gradtide.selectors.indices import index_dtype
from gradtide.wire import Codec
from gradtide.wire.indices import Indices, first_ones

# What codes are looked at as: bits of one => a whole number.
KINDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class NonZero(NamedTuple):
    """Messages of `numel` values, of which at most `most` are not zero."""

    codec: Codec
    numel: int
    most: int

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    @property
    def pays(self) -> bool:
        """Whether these are shorter than those of the codec."""
        there = self._number > 0
        return there and self.nbytes < self.codec.nbytes(self.numel)

    def shorten(self, message: Tensor, short: Tensor) -> None:
        """Write what is in a message of the codec to a shorter one (both uint8).

        Of more values than there may be the first ones.
        """
        (head, codes), own = self._parts(message), self._indices
        its_head, its_codes, indices, _ = torch.split(short, self._sizes)
        its_head.copy_(head)
        codes = _apart(codes, self._bits)
        where = first_ones(codes != 0, own.room)
        missing, inside = where >= own.span, where.clamp(max=own.span - 1)
        found = codes.index_select(0, inside).masked_fill_(missing, 0)
        _together(found, self._bits, its_codes)
        own.encode(inside.to(index_dtype(own.span)), indices)

    def restore(self, short: Tensor, message: Tensor) -> None:
        """Write the message of the codec that was shortened."""
        (head, codes), own = self._parts(message), self._indices
        its_head, its_codes, indices, _ = torch.split(short, self._sizes)
        head.copy_(its_head)
        found = _apart(its_codes, self._bits)[: own.room]
        where = own.decode(indices, own.room, index_dtype(own.span))
        whole = found.new_zeros(own.span)
        # Added, as indices that stand for nothing are those of others, with a zero.
        _together(whole.index_add_(0, where, found), self._bits, codes)

    @property
    def _bits(self) -> int:
        return self.codec.codes(self.numel)[2]

    @property
    def _number(self) -> int:
        """Of codes in a message of the codec."""
        _, nbytes, bits = self.codec.codes(self.numel)
        return nbytes * 8 // bits

    @property
    def _indices(self) -> Indices:
        return Indices(min(self.most, self._number), self._number)

    @property
    def _sizes(self) -> list[int]:
        """Bytes in front of codes, of codes and indices, and up to the next message."""
        own = self._indices
        sizes = [self.codec.codes(self.numel)[0], -(-own.room * self._bits // 8)]
        return [*sizes, own.nbytes, -(sum(sizes) + own.nbytes) % ALIGN]

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """What is in front of codes, and codes."""
        begin, nbytes, _ = self.codec.codes(self.numel)
        return message[:begin], message[begin : begin + nbytes]


def _apart(packed: Tensor, bits: int) -> Tensor:
    """Codes (1-D, whole numbers) of `bits` each, which may share bytes."""
    if bits >= 8:
        return packed.view(KINDS[bits])
    shifts = range(0, 8, bits)
    return torch.cat([packed >> at & ((1 << bits) - 1) for at in shifts])


def _together(codes: Tensor, bits: int, packed: Tensor) -> None:
    """`_apart`, undone: written to `packed`, which may have room for more."""
    if bits >= 8:
        packed.view(KINDS[bits]).copy_(codes)
        return
    per = 8 // bits
    planes = F.pad(codes, (0, per * len(packed) - len(codes))).view(per, -1)
    packed.copy_(planes[0])
    for i in range(1, per):
        packed |= planes[i] << i * bits
