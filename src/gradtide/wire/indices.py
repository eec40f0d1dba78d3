"""Sorted indices on the wire, in a length that their number decides.

[Note: indices] Of every index some low bits travel as they are. What is above them is
a number that rises slowly: that of index i is written as a one at place `number + i` of
a row of bits, which is otherwise zero. This is Elias-Fano coding (Elias, 1974; Fano,
1971): of k indices below n, log2(n / k) and at most two bits each, where no code can
do with fewer than log2(n / k) and 1.44. Its length follows from k and n alone, so that
nothing has to be known of the indices to receive them.

What is compiled by numba writes the same bytes as torch does here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtide.core.kernels import Kernels


def _fast() -> Any:
    import gradtide.wire.fast_indices as fast_indices

    return fast_indices


KERNELS = Kernels(
    _fast,
    "encoding of indices",
    "indices are encoded by torch, which takes some seven times as long",
)


class Indices(NamedTuple):
    """The bytes of at most `room` sorted indices below `span`. [Note: indices]"""

    room: int
    span: int

    @property
    def low(self) -> int:
        """Bits of an index that travel as they are: so many that the rest is least."""
        return _layout(self.room, self.span)[0]

    @property
    def sizes(self) -> list[int]:
        """Bytes of all low bits, and of the row of bits."""
        _, *sizes = _layout(self.room, self.span)
        return sizes

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def encode(self, where: Tensor, message: Tensor) -> None:
        """Write indices (1-D, sorted; some may be equal) to `message` (uint8)."""
        if not len(message):
            return
        kernels = _compiled(where)
        if kernels is not None:
            kernels.encode(where.contiguous().numpy(), *self._arrays(message), self.low)
            return
        lower, upper = torch.split(message, self.sizes)
        bits, count = _zeros(upper), _counted(where)
        bits.index_fill_(0, ((where >> self.low) + count).long(), 1)
        _pack(bits, upper)
        bits = _zeros(lower)
        own = bits[: len(where) * self.low].view(len(where), self.low)
        own.copy_((where[:, None] >> _shifts(self.low, where)) & 1)
        _pack(bits, lower)

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """The indices that were encoded, which are `count`, as a tensor of `dtype`.

        The host does not wait for a device.
        """
        where = message.new_empty(count, dtype=dtype)
        if not count:
            return where
        kernels = _compiled(where)
        if kernels is not None:
            kernels.decode(*self._arrays(message), self.low, where.numpy())
            return where
        lower, upper = torch.split(message, self.sizes)
        number = first_ones(_unpack(upper), count).to(dtype) - _counted(where)
        own = _unpack(lower)[: count * self.low].view(count, self.low).to(dtype)
        low = (own << _shifts(self.low, where)).sum(1, dtype=dtype)
        return (number << self.low) | low

    def _arrays(self, message: Tensor) -> tuple[Any, Any]:
        """The low bits and the row of bits, as arrays of numpy."""
        both, (low, _) = message.numpy(), self.sizes
        return both[:low], both[low:]


@lru_cache(1 << 14)
def _layout(room: int, span: int) -> tuple[int, int, int]:
    """Low bits of an index, and bytes of all of them and of the row of bits."""
    low = max(((span - 1) // max(room, 1)).bit_length() - 1, 0)
    if not room:
        return low, 0, 0
    places = room + ((span - 1) >> low)
    return low, -(-room * low // 8), -(-places // 8)


def prepare(device: torch.device) -> None:
    """Have ready what encodes indices on such a device."""
    if device.type != "cpu":
        return

    def all_of_it(_: Any) -> None:
        own = Indices(2, 100)
        where = torch.arange(2, dtype=torch.int32, device="cpu")
        message = torch.zeros(own.nbytes, dtype=torch.uint8, device="cpu")
        own.encode(where, message)
        own.decode(message, 2, torch.int32)

    KERNELS.prepare("indices", all_of_it)


def _compiled(where: Tensor) -> Any:
    """What is compiled for such indices, or None."""
    there = where.device.type == "cpu" and where.dtype == torch.int32
    return KERNELS.module() if there else None


def first_ones(flags: Tensor, count: int) -> Tensor:
    """The places (int64) of the first `count` flags (1-D) that are not zero.

    In the place of those that are missing: the number of flags. The host does not wait
    for a device.
    """
    if flags.is_cpu:
        found = flags.nonzero().squeeze(1)[:count]
        return torch.nn.functional.pad(found, (0, count - len(found)), value=len(flags))
    wanted = torch.arange(1, count + 1, dtype=torch.int64, device=flags.device)
    return torch.searchsorted(flags.cumsum(0), wanted)


# - Bits -------------------------------------------------------------------------------


def _shifts(bits: int, like: Tensor) -> Tensor:
    return torch.arange(bits, dtype=like.dtype, device=like.device)


def _counted(where: Tensor) -> Tensor:
    return torch.arange(len(where), dtype=where.dtype, device=where.device)


def _zeros(message: Tensor) -> Tensor:
    """A byte for every bit of a message."""
    return message.new_zeros(8 * len(message))


def _pack(bits: Tensor, message: Tensor) -> None:
    message.copy_((bits.view(-1, 8) << _shifts(8, bits)).sum(1))


def _unpack(message: Tensor) -> Tensor:
    return ((message[:, None] >> _shifts(8, message)) & 1).flatten()
