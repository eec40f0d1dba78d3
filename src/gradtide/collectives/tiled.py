"""Of every tile of 64 x 64 the largest entries, gathered by everybody."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradtide.collectives import _tiles
from gradtide.collectives._entries import check
from gradtide.collectives.dense import Dense, pays
from gradtide.core.ops import AllGather, Flow, Group
from gradtide.core.payload import Payload, Traits
from gradtide.wire import Wire, codec_of


@dataclass(frozen=True)
class TiledTopK:
    """Gather every rank's largest entries of each tile, and add them up there.

    This is the exchange of SparseLoCo (Sarfi et al., 2025, arXiv:2508.15706), which
    DeMo (Peng et al., 2024, arXiv:2411.19870) cut into tiles first. Matrices are cut
    into tiles of 64 x 64 elements, all else into runs of 4096, and each gives the same
    share of its entries. So no layer is left out whose entries are smaller than those
    of others, nothing is remembered between steps, and a place in a tile takes 12 bits.
    Where hosts have several ranks, matrices are in runs of 4096, too.

    Cost, with P ranks: one round of P - 1 messages. A rank sends 5.5 k (P - 1) bytes
    for float32 (4 for a value, 1.5 for its place), 1.8 k (P - 1) with "2bit". The mean
    has between k and P k entries, so the bytes grow with the number of ranks. A
    bucket for which this would not send fewer bytes travels by `Dense`, and then the
    casts of `wire` are lost.

    Residual: what the rank itself did not select. A tile that has nothing but zeros
    gives zeros; "2bit" and "sign" have none, and move these entries a little to and
    fro.

    Args:
        density: The share of its entries that every tile gives, above 0 and at most 1,
            and at least one entry. Larger values cost more bytes and delay fewer
            entries. The default, 1/64, is SparseLoCo's: 64 of 4096.
        wire: In what values travel, see `Dense`. None, the default, rounds nothing;
            SparseLoCo has 2 bits. What a wire takes off goes to the residual.

    Raises:
        ValueError: A field is outside its range.
    """

    density: float = 1 / 64
    wire: Wire = None

    traits = Traits(depends_on="size")

    def __post_init__(self) -> None:
        check(self)

    def pays_below(self, size: int) -> float:
        width = codec_of(self.wire, torch.float32).width
        return 2 * width / (size * (width + _tiles.WIDTH))

    def reduce(self, payload: Payload, group: Group) -> Flow:
        flat, codec = payload.flat, codec_of(self.wire, payload.flat.dtype)
        grids = _tiles.grids_of(payload)
        chosen = _tiles.places_of(grids, self.density)
        nbytes = (group.size - 1) * _tiles.length(len(chosen), codec)
        if not pays(nbytes, len(flat), group.size, codec):
            return (yield from Dense(self.wire).reduce(payload, group))
        sizes = payload.selection_scores.abs()
        places = chosen.largest([grid.cut(sizes, fill=-1.0) for grid in grids])
        where = chosen.in_bucket(places, len(flat))
        values = payload.pop_entries(where, codec.dtype)
        message = _tiles.pack(places, values, codec)
        if not codec.exact:
            payload.add_residual(where, values)
        messages = yield AllGather(message)
        found = _tiles.unpack(messages, len(chosen), codec, flat.dtype)
        return payload.mean_of_entries(chosen.in_bucket(found[0], len(flat)), found[1])
