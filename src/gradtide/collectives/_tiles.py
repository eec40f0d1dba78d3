"""A bucket in tiles of up to 64 x 64 elements, and places in them on the wire.

[Note: tiles] Tensors of two or more dimensions are matrices of their first dimension by
the others, and cut in both. All between them (vectors, and what fills slots up) is cut
into runs of 4096 elements, as a matrix of 64 columns is. Tiles at the edges are smaller
and give fewer entries. Where a bucket comes in slices, as between hosts of several
ranks, all is in such runs: then which entries compete is another choice, and no worse.

All ranks have the same tiles, and of each the same number of entries travels: so a
message has a known length, and a place in a tile takes 12 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from gradtide.collectives._entries import ALIGN
from gradtide.collectives.lowrank import gaps, matrices
from gradtide.core.payload import Payload
from gradtide.selectors.indices import index_dtype
from gradtide.wire import Codec

SIDE = 64  # elements: a tile has its square, so that a place takes 12 bits
WIDTH = 1.5  # bytes of a place


@dataclass(frozen=True)
class Grid:
    """A stretch of a bucket in tiles; the last row of its matrix may be shorter."""

    begin: int
    length: int
    columns: int

    @property
    def rows(self) -> int:
        return -(-self.length // self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a tile."""
        return min(SIDE, self.rows), min(SIDE, self.columns)

    @property
    def tiles(self) -> tuple[int, int]:
        """How many there are one below the other, and side by side."""
        height, width = self.shape
        return -(-self.rows // height), -(-self.columns // width)

    def cut(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """The tiles [number, elements] of a tensor like the bucket's: a copy.

        Those at the edges are made complete by `fill`.
        """
        (height, width), (down, across) = self.shape, self.tiles
        x = flat[self.begin : self.begin + self.length]
        if missing := self.rows * self.columns - self.length:
            x = F.pad(x, (0, missing), value=fill)
        x = x.view(self.rows, self.columns)
        right, below = across * width - self.columns, down * height - self.rows
        if right or below:
            x = F.pad(x, (0, right, 0, below), value=fill)
        x = x.view(down, height, across, width).transpose(1, 2)
        return x.reshape(down * across, height * width)

    def joined(self, tiles: Tensor) -> Tensor:
        """The stretch (1-D) that has these tiles: the inverse of `cut`."""
        (height, width), (down, across) = self.shape, self.tiles
        x = tiles.view(down, across, height, width).transpose(1, 2)
        x = x.reshape(down * height, across * width)
        return x[: self.rows, : self.columns].reshape(-1)[: self.length]

    def kept(self, density: float) -> Tensor:
        """How many entries each tile gives (int64, on the CPU): at least one."""
        (height, width), (down, across) = self.shape, self.tiles
        heights, widths = (
            torch.full((down,), height, dtype=torch.int64, device="cpu"),
            torch.full((across,), width, dtype=torch.int64, device="cpu"),
        )
        heights[-1] = self.rows - (down - 1) * height
        widths[-1] = self.columns - (across - 1) * width
        sizes = (heights[:, None] * widths).flatten()
        sizes[-1] -= self.rows * self.columns - self.length
        return (sizes.double() * density).round().long().clamp_(min=1)


def grids_of(payload: Payload) -> tuple[Grid, ...]:
    """What a bucket consists of, in memory order: see [Note: tiles]."""
    places = matrices(payload)
    found = [Grid(p.begin, p.end - p.begin, p.columns) for p in places]
    rest = gaps(places, len(payload.flat))
    found += [Grid(gap.start, gap.stop - gap.start, SIDE) for gap in rest]
    return tuple(sorted(found, key=lambda grid: grid.begin))


class Places:
    """Of every tile some places: where they are, by the tiles' shapes alone.

    What there is to know of each tile is on the device from the first step on; what
    there is to know of each place is computed there.
    """

    def __init__(self, grids: Sequence[Grid], density: float) -> None:
        kept = [grid.kept(density) for grid in grids]
        self._most = [int(of_grid.max()) for of_grid in kept]
        self._table = _table(grids, kept, self._most)
        self._tables: dict[torch.device, dict[str, Tensor]] = {}
        self._count = sum(int(of_grid.sum()) for of_grid in kept)

    def __len__(self) -> int:
        return self._count

    def largest(self, tiles: Sequence[Tensor]) -> Tensor:
        """Places (int32) of the largest of each tile, of one grid after the other.

        `tiles` are magnitudes, grid by grid; what is no element is negative. NaN is
        largest.
        """
        pairs = zip(tiles, self._most, strict=True)
        found = [torch.topk(sizes, most, dim=1).indices for sizes, most in pairs]
        places = torch.cat([of_grid.to(torch.int32).flatten() for of_grid in found])
        if len(places) == len(self):
            return places
        [shift] = self._of_each(["shift"], places.device)
        at = torch.arange(len(self), dtype=torch.int64, device=places.device)
        return places.index_select(0, at + shift)

    def in_bucket(self, places: Tensor, n: int) -> Tensor:
        """Where places [..., entries] are in a bucket of n elements."""
        found = self._of_each(["first", "columns", "width"], places.device)
        first, columns, width = (x.to(index_dtype(n)) for x in found)
        down = torch.div(places, width, rounding_mode="floor")
        return first + down * columns + (places - down * width)

    def in_tiles(self, places: Tensor) -> Tensor:
        """Where places [..., entries] are in all grids' tiles, one after the other."""
        [before] = self._of_each(["before"], places.device)
        return before + places

    def _of_each(self, names: Sequence[str], device: torch.device) -> list[Tensor]:
        """What there is to know of the tile of each entry."""
        table = self._tables.get(device)
        if table is None:
            # Waited for, once: later steps may be in another stream.
            table = {name: x.to(device) for name, x in self._table.items()}
            self._tables = {device: table}  # of one device: they follow the bucket
        numbers = torch.arange(len(table["kept"]), dtype=torch.int64, device=device)
        tile = numbers.repeat_interleave(table["kept"], output_size=len(self))
        return [table[name].index_select(0, tile) for name in names]


def _table(
    grids: Sequence[Grid], kept: Sequence[Tensor], most: Sequence[int]
) -> dict[str, Tensor]:
    """Of every tile (int64, on the CPU): how many entries it gives; where it begins in
    the bucket; the columns of its matrix, and its own; the elements of all tiles before
    it; and how far its entries are further ahead where every tile of a grid gives as
    many as the fullest."""
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")  # in an empty bucket
    names = ("kept", "first", "columns", "width", "before", "shift")
    found = {name: [nothing] for name in names}
    for grid, of_grid, full in zip(grids, kept, most, strict=True):
        (height, width), (_, across) = grid.shape, grid.tiles
        tile = torch.arange(len(of_grid), dtype=torch.int64, device="cpu")
        row, column = tile // across * height, tile % across * width
        own = {
            "kept": of_grid,
            "first": grid.begin + row * grid.columns + column,
            "columns": torch.full_like(tile, grid.columns),
            "width": torch.full_like(tile, width),
            "before": torch.full_like(tile, prod(grid.shape)),
            "shift": full - of_grid,
        }
        for name, numbers in own.items():
            found[name].append(numbers)
    table = {name: torch.cat(numbers) for name, numbers in found.items()}
    for name in ("before", "shift"):
        table[name] = table[name].cumsum(0) - table[name]
    return table


@lru_cache(maxsize=64)  # buckets of a model, say
def places_of(grids: tuple[Grid, ...], density: float) -> Places:
    """The places of these grids, as they are in every step."""
    return Places(grids, density)


def length(count: int, codec: Codec) -> int:
    """Bytes of a message of `count` entries."""
    nbytes = codec.nbytes(count) + -(-count // 2) * 3
    return -(-nbytes // ALIGN) * ALIGN


def pack(places: Tensor, values: Tensor, codec: Codec) -> Tensor:
    """One message (uint8) of entries; values are left with what it does not hold."""
    count = len(places)
    message = values.new_zeros(length(count, codec), dtype=torch.uint8)
    coded = codec.nbytes(count)
    codec.encode(values, message[:coded])
    pairs = F.pad(places, (0, count % 2)).view(-1, 2)
    one, two = pairs.unbind(1)
    three = torch.stack([one & 0xFF, one >> 8 | (two & 0xF) << 4, two >> 4], 1)
    message[coded : coded + three.numel()] = three.flatten().to(torch.uint8)
    return message


def unpack(
    messages: Tensor, count: int, codec: Codec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Places (int32) and values (`dtype`) of messages of `pack`, row by row."""
    coded, packed = codec.nbytes(count), -(-count // 2) * 3
    values = messages.new_empty(len(messages), count, dtype=dtype)
    for message, row in zip(messages, values, strict=True):
        codec.decode(message[:coded], row)
    three = messages[:, coded : coded + packed].to(torch.int32)
    a, b, c = three.view(len(messages), -1, 3).unbind(2)
    pairs = torch.stack([a | (b & 0xF) << 8, b >> 4 | c << 4], 2)
    return pairs.flatten(1)[:, :count], values
