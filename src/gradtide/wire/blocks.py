"""Messages of blocks: the levels of all of them, then their codes, packed.

[Note: planes] A byte has 8 / bits codes. They are those of elements that lie a plane
apart, not side by side: neighbours go to neighbouring bytes, so that a vector of
elements becomes a vector of bytes. A block of 256 elements has 8 / bits planes; a
shorter one, at the end of a message, as many shorter ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.wire.formats import BLOCK, TINY, Format
from gradtide.wire.tools import compiled

CHUNK = 512  # blocks whose temporaries stay in a core's cache
ALIGN = 4  # bytes: levels may be viewed wherever a message begins


@dataclass(frozen=True)
class Blockwise:
    """Blocks of 256 values, each in a format with levels of its own.

    Levels are found, and sums taken, in single precision; in the values' own, if that
    is wider.
    """

    format: Format

    exact = False
    dtype = torch.float32
    keeps = True
    compiled = ("encode", "add")

    @property
    def width(self) -> float:
        return self.format.bits / 8 + 4 * self.format.num_levels / BLOCK

    def nbytes(self, count: int) -> int:
        whole = self._begin(count) + self._num_bytes(count)
        return -(-whole // ALIGN) * ALIGN

    def codes(self, count: int) -> tuple[int, int, int]:
        nbytes = self._num_bytes(count) if self.format.has_zero else 0
        return self._begin(count), nbytes, self.format.bits

    def _begin(self, count: int) -> int:
        """Bytes of levels."""
        return 4 * self.format.num_levels * -(-count // BLOCK)

    def _num_bytes(self, count: int) -> int:
        """Bytes of codes."""
        blocks, short = divmod(count, BLOCK)
        return blocks * self._plane + -(-short * self._plane // BLOCK)

    @property
    def _plane(self) -> int:
        """Bytes of a block, which are the elements of a plane."""
        return BLOCK * self.format.bits // 8

    # - The contract -------------------------------------------------------------------

    def encode(self, values: Tensor, message: Tensor) -> None:
        kernel = compiled("encode", values)
        if values.is_meta:
            values.zero_()  # one pass, for who counts them
        elif kernel is not None:
            kernel(*self._kind, values, message)
        elif values.itemsize < 4:
            wide = values.float()
            self.encode(wide, message)
            values.copy_(wide)
        else:
            for blocks in self._blocks(values, message):
                self._encode(*blocks)

    write = encode

    def witness(self, messages: Tensor, count: int) -> Tensor:
        return messages.view(torch.float32)[..., : self._begin(count) // 4]

    def decode(self, message: Tensor, out: Tensor) -> None:
        self._sum(message[None], out, fresh=True)

    def add(self, messages: Tensor, out: Tensor) -> None:
        self._sum(messages, out, fresh=False)

    def _sum(self, messages: Tensor, out: Tensor, fresh: bool) -> None:
        """Add messages to `out`, or to zeros in its place if it is `fresh`."""
        kernel = compiled("add", out)
        if out.is_meta:
            out.zero_() if fresh else out.add_(out)
        elif kernel is not None:
            kernel(*self._kind, messages, out, fresh)
        elif out.itemsize < 4:
            wide = out.float()
            self._sum(messages, wide, fresh)
            if fresh:
                # The product of a scale could be just above the largest number.
                most = torch.finfo(out.dtype).max
                wide.clamp_(-most, most)
            out.copy_(wide)
        else:
            if fresh:
                out.zero_()
            for message in messages:
                for blocks in self._blocks(out, message):
                    self._add(*blocks)

    # - Where no kernel is -------------------------------------------------------------

    @property
    def _kind(self) -> tuple[int, int, int]:
        return self.format.kind, self._plane, self.format.num_levels

    def _blocks(
        self, values: Tensor, message: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views, some blocks at a time: of values [blocks, elements], levels [blocks,
        levels], and codes [blocks, bytes]."""
        if not values.numel():
            return
        whole, short = divmod(values.numel(), BLOCK)
        width, plane = self.format.num_levels, self._plane
        blocks = whole + (short > 0)
        levels = message[: 4 * width * blocks].view(torch.float32).view(-1, width)
        codes = message[4 * width * blocks :]
        size = CHUNK if values.device.type == "cpu" else max(whole, 1)
        for begin in range(0, whole, size):
            end = min(begin + size, whole)
            yield (
                values[begin * BLOCK : end * BLOCK].view(-1, BLOCK),
                levels[begin:end],
                codes[begin * plane : end * plane].view(-1, plane),
            )
        if short:
            room = -(-short * plane // BLOCK)
            ending = codes[whole * plane : whole * plane + room]
            yield values[whole * BLOCK :][None], levels[whole:], ending[None]

    def _encode(self, x: Tensor, levels: Tensor, codes: Tensor) -> None:
        count, per = x.shape[1], 8 // self.format.bits
        padding = codes.shape[1] * per - count
        narrow = torch.nn.functional.pad(x.to(torch.float32), (0, padding))
        most = narrow.abs().amax(1)
        finite = most.isfinite()
        usual = finite & (most >= TINY)
        # Any magnitude will do where levels are not found by it.
        narrow = _where(usual, narrow, 1.0)
        found = self.format.fit(narrow, _where(usual, most, 1.0), count)
        usual = usual & (found[:, -1] >= TINY)
        code = _where(usual, self.format.code(narrow, found), 0)
        levels.copy_(_where(usual, found, 0.0))
        levels.copy_(_where(finite, levels, torch.nan))
        planes = code.view(len(x), per, -1).to(torch.uint8)
        packed = codes.copy_(planes[:, 0])
        for p in range(1, per):
            packed |= planes[:, p] << (p * self.format.bits)
        rest = x - self.format.value(code, levels)[:, :count]
        if not _all(finite):
            stays = torch.where(x.to(torch.float32).isfinite(), x, x.new_zeros(()))
            rest = torch.where(finite[:, None], rest, stays)
        x.copy_(rest)

    def _add(self, x: Tensor, levels: Tensor, codes: Tensor) -> None:
        bits = self.format.bits
        wide = codes.to(torch.int32)
        planes = [(wide >> at) & ((1 << bits) - 1) for at in range(0, 8, bits)]
        heard = self.format.value(torch.cat(planes, 1), levels)
        x.add_(heard[:, : x.shape[1]])


def _all(mask: Tensor) -> bool:
    """Whether all are set, as far as that is known without waiting for a device."""
    return mask.device.type == "cpu" and bool(mask.all())


def _where(mask: Tensor, x: Tensor, other: float) -> Tensor:
    """`x` (one row, or one number, a block) where a block's mask is set."""
    if _all(mask):
        return x
    return x.where(mask.view(-1, *[1] * (x.dim() - 1)), x.new_full((), other))
