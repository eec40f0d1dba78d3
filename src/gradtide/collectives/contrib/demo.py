"""Of every tile the largest frequencies, gathered by everybody."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradtide.collectives import _tiles
from gradtide.collectives._entries import check
from gradtide.collectives._tiles import SIDE, Grid
from gradtide.collectives.dense import Dense, pays
from gradtide.core.ops import AllGather, Flow, Group
from gradtide.core.payload import Payload, Traits
from gradtide.wire import Wire, codec_of


@dataclass(frozen=True)
class DeMo:
    """Gather every rank's largest cosine coefficients of each tile; the mean is theirs.

    This is the exchange of DeMo (Peng et al., Decoupled momentum optimization, ICLR
    2026, arXiv:2411.19870). Tiles are those of `TiledTopK`. Each goes through an
    orthonormal cosine transform (DCT-II) in both directions, and its largest
    coefficients travel. The transform is linear, so the mean of coefficients is that of
    tiles, and what a rank did not send is its tile less what it sent, turned back.

    Two parts of the published method are not in here, because they are an optimizer's:
    its steps are by the signs of the mean, and its residual, which decays by .999 a
    step, is its momentum. Here nothing decays, so the conservation law holds, and the
    user's optimizer steps. Give it little momentum of its own: the residual is some.

    Cost, with P ranks: one round of P - 1 messages. A rank sends 5.5 k (P - 1) bytes
    for float32, of k = n kept / 4096 coefficients, less with `wire`. The bytes grow
    with the number of ranks. In time, three transforms, 256 multiplications for each
    element and each of them. A bucket for which this would not send fewer bytes travels
    by `Dense`, and then the casts of `wire` are lost.

    Residual: what the coefficients that were sent do not span. If anything is not
    finite, the non-finite guard is told, and the tile that it is in travels as NaN;
    what is finite in it stays.

    Args:
        kept: How many coefficients of 4096 travel, 1 to 4096; of smaller tiles as
            large a share, and at least one. More cost more bytes and delay less. The
            default, 32, is the published one.
        wire: In what coefficients travel, see `Dense`. What a wire takes off goes to
            the residual. None, the default, rounds nothing.

    Raises:
        ValueError: A field is outside its range.
    """

    kept: int = 32
    wire: Wire = None

    traits = Traits(depends_on="size")

    def __post_init__(self) -> None:
        check(self)
        if not 1 <= self.kept <= SIDE * SIDE:
            raise ValueError(f"DeMo(kept={self.kept}): from 1 to {SIDE * SIDE}")

    def reduce(self, payload: Payload, group: Group) -> Flow:
        flat, codec = payload.flat, codec_of(self.wire, payload.flat.dtype)
        grids = _tiles.grids_of(payload)
        chosen = _tiles.places_of(grids, self.kept / SIDE**2)
        nbytes = (group.size - 1) * _tiles.length(len(chosen), codec)
        if not pays(nbytes, len(flat), group.size, codec):
            return (yield from Dense(self.wire).reduce(payload, group))
        wide = torch.promote_types(flat.dtype, torch.float32)
        found = [_turned(grid.cut(flat.to(wide)), grid, back=False) for grid in grids]
        places = chosen.largest([tiles.abs() for tiles in found])
        where = chosen.in_tiles(places)
        whole = torch.cat([tiles.flatten() for tiles in found])
        values = whole.index_select(0, where).to(flat.dtype)
        payload.check_finite(values.to(codec.dtype))
        payload.num_sent += len(values)
        sent = values.clone()
        message = _tiles.pack(places, values, codec)
        sent -= values
        _take_out(payload, grids, where, sent, len(whole))
        messages = yield AllGather(message)
        everybody = _tiles.unpack(messages, len(chosen), codec, whole.dtype)
        total = torch.zeros_like(whole)
        for at, heard in zip(*everybody, strict=True):
            total.index_add_(0, chosen.in_tiles(at), heard)
        mean = payload.mean_buffer()
        _each(grids, total.div_(group.size), mean, Tensor.copy_)
        return mean


def _take_out(
    payload: Payload, grids: Sequence[Grid], where: Tensor, sent: Tensor, n: int
) -> None:
    """Take what was sent out of the bucket, and what is not finite.

    What is sent of a tile that is not finite is not, and then all of it stays.
    """
    if not bool(sent.isfinite().all()):
        sent = sent.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        payload.flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    wide = torch.promote_types(sent.dtype, torch.float32)
    whole = torch.zeros(n, dtype=wide, device=sent.device)
    whole.index_copy_(0, where, sent.to(wide))
    _each(grids, whole, payload.flat, Tensor.sub_)


def _each(
    grids: Sequence[Grid],
    whole: Tensor,
    out: Tensor,
    write: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Turn the coefficients of all tiles back, and `write` them to a bucket."""
    lengths = [math.prod((*grid.tiles, *grid.shape)) for grid in grids]
    for grid, own in zip(grids, torch.split(whole, lengths), strict=True):
        tiles = _turned(own.view(math.prod(grid.tiles), -1), grid, back=True)
        part = out[grid.begin : grid.begin + grid.length]
        write(part, grid.joined(tiles).to(out.dtype))


def _turned(tiles: Tensor, grid: Grid, back: bool) -> Tensor:
    """Tiles [number, elements] as coefficients, or these as tiles."""
    height, width = grid.shape
    left, right = (_cosines(n, tiles.dtype, tiles.device) for n in grid.shape)
    if back:
        left, right = left.T, right.T
    x = tiles.view(-1, height, width)
    return (left @ x @ right.T).flatten(1)


@lru_cache(maxsize=256)
def _cosines(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal matrix of the DCT-II: a row for each frequency."""
    k = torch.arange(n, dtype=torch.float64, device="cpu")
    rows = torch.cos(math.pi / n * k[:, None] * (k + 0.5)) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows.to(dtype).to(device)
