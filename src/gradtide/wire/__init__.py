"""Wires: in how many bits values travel; nothing of buckets or ranks.

This file has the contract, casts, and the names. What the names of less than 16 bits
stand for is loaded when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from gradtide.wire import tools

Wire: TypeAlias = Literal["bf16", "fp16", "int8", "e3m0", "2bit", "sign"] | None
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
NARROW = ("int8", "e3m0", "2bit", "sign")  # what a dense exchange rounds off is kept
WIRES = (*CASTS, *NARROW)


class Codec(Protocol):
    """How values travel: as a message (uint8) whose length their number decides.

    A codec is a projection: what was decoded once is encoded without loss, in single
    precision and above. Where ranks have to hold the same bits in half precision, too,
    all of them decode the same message, or it is sent on as it is.
    """

    @property
    def exact(self) -> bool:
        """Nothing is ever rounded."""

    @property
    def dtype(self) -> torch.dtype:
        """What values have to be finite in, to arrive finite."""

    @property
    def width(self) -> float:
        """Bytes of a value in a long message."""

    @property
    def keeps(self) -> bool:
        """What a dense exchange rounds off is a residual, and not lost."""

    @property
    def compiled(self) -> tuple[str, ...]:
        """The functions of `tools` that it calls, where there are any."""

    def nbytes(self, count: int) -> int:
        """The length of a message of `count` values."""

    def codes(self, count: int) -> tuple[int, int, int]:
        """Where codes lie in a message of `count` values: the bytes in front of them,
        their bytes, and the bits of each.

        In a code no bit is set if it stands for +0 alone. There are none of a wire that
        has no zero.
        """

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write `values` (1-D, contiguous) to `message`; what that does not hold stays.

        In `values` is then what was rounded off. It is zero for values that are not
        finite: they, and those that share a block with them, arrive as NaN or infinite.
        """

    def write(self, values: Tensor, message: Tensor) -> None:
        """`encode` without a look at what stays: `values` may be anything then."""

    def witness(self, messages: Tensor, count: int) -> Tensor:
        """Numbers that are not all finite if anything in messages (rows) is not."""

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the values of a message to `out` (1-D, contiguous)."""

    def add(self, messages: Tensor, out: Tensor) -> None:
        """Add the values of messages (rows), one after the other, to `out`."""


@dataclass(frozen=True)
class Cast:
    """Values in a dtype, which is `exact` if it is their own."""

    dtype: torch.dtype
    exact: bool = False

    keeps = False
    compiled = ("cast",)

    @property
    def width(self) -> float:
        return self.dtype.itemsize

    def nbytes(self, count: int) -> int:
        return count * self.dtype.itemsize

    def codes(self, count: int) -> tuple[int, int, int]:
        return 0, self.nbytes(count), 8 * self.dtype.itemsize

    def encode(self, values: Tensor, message: Tensor) -> None:
        sent, kernel = message.view(self.dtype), tools.compiled("cast", values)
        if values.dtype == self.dtype:
            sent.copy_(values)
            values.zero_()
        elif kernel is not None:
            kernel(values, sent)
        else:
            values.sub_(sent.copy_(values))
            values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def write(self, values: Tensor, message: Tensor) -> None:
        message.view(self.dtype).copy_(values)

    def witness(self, messages: Tensor, count: int) -> Tensor:
        return messages.view(self.dtype)

    def decode(self, message: Tensor, out: Tensor) -> None:
        out.copy_(message.view(self.dtype))

    def add(self, messages: Tensor, out: Tensor) -> None:
        for row in messages.view(self.dtype):
            out.add_(row)


def round_off(values: Tensor, codec: Codec) -> Tensor:
    """Round `values` (1-D) in place to what a codec holds; returns what that takes."""
    rest = values.clone()
    message = values.new_empty(codec.nbytes(len(values)), dtype=torch.uint8)
    codec.encode(rest, message)
    codec.decode(message, values)
    return rest


@cache
def codec_of(wire: Wire, dtype: torch.dtype) -> Codec:
    """How values of `dtype` travel: never wider than they are."""
    own: Codec = Cast(dtype, exact=True)
    if wire is None:
        return own
    if wire in CASTS:
        found: Codec = Cast(CASTS[wire])
    else:
        # Here: most trainings do without.
        from gradtide.wire.blocks import Blockwise
        from gradtide.wire.formats import FORMATS

        found = Blockwise(FORMATS[wire])
    return found if found.width < own.width else own


def prepare(wire: Wire, dtype: torch.dtype, device: torch.device) -> None:
    """Have ready what lets such tensors travel by a wire."""
    codec = codec_of(wire, dtype)
    if not codec.exact:
        tools.prepare(codec, dtype, device)
