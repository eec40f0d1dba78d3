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
from torch import Tensor

from gradtide.collectives._entries import ALIGN
from gradtide.selectors.indices import index_dtype
from gradtide.wire import Codec
from gradtide.wire.indices import Indices, first_ones

# What codes are looked at as: bytes of one => a whole number.
KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        there = self.codec.codes(self.numel)[1] > 0
        return there and self.nbytes < self.codec.nbytes(self.numel)

    def shorten(self, message: Tensor, short: Tensor) -> None:
        """Write what is in a message of the codec to a shorter one (both uint8).

        Of more values than there may be the first ones.
        """
        head, codes = self._parts(message)
        its_head, its_codes, indices, _ = torch.split(short, self._sizes)
        its_head.copy_(head)
        own = self._indices
        where = first_ones(codes != 0, own.room)
        missing, inside = where >= own.span, where.clamp(max=own.span - 1)
        found = codes.index_select(0, inside).masked_fill_(missing, 0)
        its_codes.view(codes.dtype).copy_(found)
        own.encode(inside.to(index_dtype(own.span)), indices)

    def restore(self, short: Tensor, message: Tensor) -> None:
        """Write the message of the codec that was shortened."""
        head, codes = self._parts(message)
        its_head, its_codes, indices, _ = torch.split(short, self._sizes)
        head.copy_(its_head)
        own = self._indices
        where = own.decode(indices, own.room, index_dtype(own.span))
        # Added, as indices that stand for nothing are those of others, with a zero.
        codes.zero_().index_add_(0, where, its_codes.view(codes.dtype))

    @property
    def _indices(self) -> Indices:
        number = self.codec.codes(self.numel)[1]
        return Indices(min(self.most, number), number)

    @property
    def _sizes(self) -> list[int]:
        """Bytes in front of codes, of codes and indices, and up to the next message."""
        (begin, _, width), own = self.codec.codes(self.numel), self._indices
        sizes = [begin, own.room * width, own.nbytes]
        return [*sizes, -sum(sizes) % ALIGN]

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """What is in front of codes, and codes."""
        begin, number, width = self.codec.codes(self.numel)
        codes = message[begin : begin + number * width]
        return message[:begin], codes.view(KINDS[width])
