"""What a block of values becomes: codes of a few bits, and numbers that scale them.

The numbers of a block are its levels (float32). Formats are arithmetic on blocks, the
rows of a matrix; nothing here knows of messages. This is the definition: `fast` does
the same for a processor, and `triton_kernels` for a GPU, bit for bit. Numbers that
something is divided by are tensors: by others, a GPU multiplies by their inverse. They
are filled in, not copied there, for which the host would wait.

[Note: projection] What was decoded once is encoded without loss, in single precision
and above: its levels are found again, and so are all codes. So an owner may round a
mean, have it scaled or looked at, and encode it when it leaves: all ranks have the
number that the owner rounded to. For this, levels are such that decoding is exact: few
bits of a scale, powers of two, or means on a grid of whole numbers.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256  # elements: 1.6 % for a scale beside 8 bits, 3 % beside 4
TINY = 2.0**-100  # a block with a smaller level counts as zero: all of it stays


class Format(Protocol):
    """Codes of `bits` bits each, 1 to 8, for values between the levels of a block."""

    kind: int  # what `fast` and `triton_kernels` call it
    bits: int
    num_levels: int
    has_zero: bool  # code 0 stands for +0

    def fit(self, x: Tensor, most: Tensor, count: int) -> Tensor:
        """The levels [blocks, num_levels] of `x` [blocks, elements], the largest last.

        `most` are the largest magnitudes, all finite and not tiny; `count` is how many
        elements of a block there are, and zeros behind.
        """

    def code(self, x: Tensor, levels: Tensor) -> Tensor:
        """The codes (int32) of `x`."""

    def value(self, codes: Tensor, levels: Tensor) -> Tensor:
        """What codes (int32) stand for: float32."""


class Int8:
    """Whole numbers from -127 to 127 times a scale, by the largest magnitude.

    A scale has 12 significant bits, rounded up. So its products are exact, and another
    scale of the same values would find the same numbers.
    """

    kind, bits, num_levels = 0, 8, 1
    has_zero = True

    def fit(self, x: Tensor, most: Tensor, count: int) -> Tensor:
        exact = (most / most.new_full((), 127.0)).view(torch.int32)
        return ((exact + 0xFFF) & ~0xFFF).view(torch.float32)[:, None]

    def code(self, x: Tensor, levels: Tensor) -> Tensor:
        return (x * (levels.new_ones(()) / levels)).round().to(torch.int32) & 0xFF

    def value(self, codes: Tensor, levels: Tensor) -> Tensor:
        return (codes - ((codes & 0x80) << 1)).to(torch.float32) * levels


class E3M0:
    """A sign and one of seven powers of two, 1 to 1/64 of the largest magnitude, or 0.

    This is a float of three bits of exponent and none of mantissa, as Streaming DiLoCo
    (Douillard et al., 2025, arXiv:2501.18512) sends it. Rounding is of logarithms: what
    is below 2^-6.5 of the largest is 0.
    """

    kind, bits, num_levels = 1, 4, 1
    has_zero = True

    def fit(self, x: Tensor, most: Tensor, count: int) -> Tensor:
        return most[:, None]

    def code(self, x: Tensor, levels: Tensor) -> Tensor:
        # An eighth of an octave's middle: no scale that is finite has a tiny inverse.
        inverse = levels.new_full((), 8 * 2**0.5) / levels
        level = ((x.abs() * inverse).view(torch.int32) >> 23) - 123
        return level.clamp_(min=0) | _sign(x) << 3

    def value(self, codes: Tensor, levels: Tensor) -> Tensor:
        level = codes & 7
        power = ((level + 120) << 23).view(torch.float32)
        power = torch.where(level > 0, power, power.new_zeros(()))
        return _signed(power * levels, codes >> 3)


class Sign:
    """A sign, for the mean magnitude of the block: no 0."""

    kind, bits, num_levels = 2, 1, 1
    has_zero = False

    def fit(self, x: Tensor, most: Tensor, count: int) -> Tensor:
        grid = _grid(most)
        total = _whole(x, grid).sum(1)
        return _mean(total, total.new_full((), count), grid)[:, None]

    def code(self, x: Tensor, levels: Tensor) -> Tensor:
        return _sign(x)

    def value(self, codes: Tensor, levels: Tensor) -> Tensor:
        return _signed(levels.expand(codes.shape), codes)


class TwoMeans:
    """A sign, and which of two magnitudes is nearer: no 0.

    These are the means of the magnitudes below the block's mean, and of the others. In
    the quantiser of SparseLoCo (Sarfi et al., 2025, arXiv:2508.15706) a code stands for
    the mean of what fell into its bin, too; but one of its four bins is around 0, where
    entries that were selected by magnitude have nothing.
    """

    kind, bits, num_levels = 3, 2, 2
    has_zero = False

    def fit(self, x: Tensor, most: Tensor, count: int) -> Tensor:
        grid = _grid(most)
        whole = _whole(x, grid)
        total = whole.sum(1)
        large = whole >= ((total + count - 1) // count)[:, None]
        above, number = (whole * large).sum(1), large.sum(1)
        below = _mean(total - above, (count - number).clamp_(min=1), grid)
        return torch.stack([below, _mean(above, number, grid)], 1)

    def code(self, x: Tensor, levels: Tensor) -> Tensor:
        middle = levels.sum(1, keepdim=True) * 0.5
        return (x.abs() >= middle).to(torch.int32) | _sign(x) << 1

    def value(self, codes: Tensor, levels: Tensor) -> Tensor:
        small, large = levels[:, :1], levels[:, 1:]
        return _signed(torch.where((codes & 1).bool(), large, small), codes >> 1)


FORMATS: dict[str, Format] = {
    "int8": Int8(),
    "e3m0": E3M0(),
    "sign": Sign(),
    "2bit": TwoMeans(),
}


def _sign(x: Tensor) -> Tensor:
    """1 where a sign is set, else 0 (int32)."""
    return (x.view(torch.int32) >> 31) & 1


def _signed(sizes: Tensor, signs: Tensor) -> Tensor:
    return (sizes.contiguous().view(torch.int32) | (signs << 31)).view(torch.float32)


def _grid(most: Tensor) -> Tensor:
    """By what the magnitudes of a block are multiplied to be whole numbers below 2^22.

    Sums of these are exact, in whatever order.
    """
    return ((275 - (most.view(torch.int32) >> 23)) << 23).view(torch.float32)


def _whole(x: Tensor, grid: Tensor) -> Tensor:
    return (x.abs() * grid[:, None]).to(torch.int32)


def _mean(total: Tensor, count: Tensor, grid: Tensor) -> Tensor:
    """The mean of whole numbers, as a whole number, and off the grid again."""
    return (total.double() / count).round().to(torch.float32) / grid
