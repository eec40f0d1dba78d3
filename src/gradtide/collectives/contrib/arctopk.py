"""All ranks send the same rows of a bucket: those whose summed sketch is longest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.collectives._entries import check
from gradtide.collectives.dense import Dense, averaged
from gradtide.core.ops import AllReduce, Flow, Group
from gradtide.core.payload import Payload, Traits, next_step
from gradtide.selectors.indices import everything, index_dtype
from gradtide.wire import Codec, Wire, codec_of

SEED = 25100  # of the sketches, so that they are equal on all ranks


@dataclass(frozen=True)
class ARCTopK:
    """Sketch every row of a bucket, and average the rows whose summed sketch is long.

    This is ARC-Top-K (2025, arXiv:2510.26709), without its error feedback (EF21): here
    the residual is what did not travel. A bucket is a matrix of rows of so many
    `columns`, one behind the other in memory. A rank multiplies it by a random matrix
    of `rank` columns, another one in each step and equal on all ranks. The sum of these
    sketches tells about how long each row of the sum is, so that all ranks choose the
    same rows, and no index travels. What is left behind the last row always travels.

    Cost, with P ranks: four rounds of P - 1 messages: an all-reduce of the sketches,
    and the two halves of a dense exchange of the rows. A rank sends 8 (P - 1) / P (rank
    / columns + density) n bytes for float32; with `wire` the rows take less, and the
    sketches do not. The bytes do not grow with the number of ranks. A bucket for which
    this would not send fewer bytes travels by `Dense`, and then the casts of `wire` are
    lost.

    Residual: on every rank, all rows that were not chosen. Every rank reads its whole
    bucket once for values that are not finite: these reach the non-finite guard at
    once.

    Args:
        density: The share of the rows that travel, above 0 and at most 1. Larger values
            cost more bytes and delay fewer rows. The default, 0.2, is the published
            one.
        columns: The elements of a row, 1 or more. Longer rows have fewer sketches, and
            are chosen more coarsely. The default is 128.
        rank: How many numbers sketch a row, 1 or more. With more of them lengths are
            truer. The default, 4, is the published one.
        wire: In what values travel, see `Dense`. What it takes off goes to the
            residual, that of the mean to the part's owner's. None, the default, rounds
            nothing.

    Raises:
        ValueError: A field is outside its range.
    """

    density: float = 0.2
    columns: int = 128
    rank: int = 4
    wire: Wire = None

    traits = Traits(depends_on="size")

    def __post_init__(self) -> None:
        check(self, columns="elements", rank="numbers")

    def reduce(self, payload: Payload, group: Group) -> Flow:
        flat, codec = payload.flat, codec_of(self.wire, payload.flat.dtype)
        rows = len(flat) // self.columns
        kept = max(1, round(self.density * rows))
        behind = len(flat) - rows * self.columns
        sent = kept * self.columns + behind
        if not pays(len(flat), sent, rows * self.rank, group.size, codec):
            return (yield from Dense(self.wire).reduce(payload, group))
        # What will be chosen is not known yet.
        payload.check_all_finite(codec.dtype)
        matrix = payload.selection_scores[: rows * self.columns].view(rows, -1)
        sketch = self._sketch(matrix, next_step(payload.state))
        summed = yield AllReduce(sketch.flatten())
        chosen = longest(summed.view(rows, self.rank), kept)
        where = chosen[:, None] * self.columns + everything(flat[: self.columns])
        last = everything(flat[:behind]) + rows * self.columns
        where = torch.cat([where.flatten(), last]).to(index_dtype(len(flat)))
        values = payload.pop_entries(where, codec.dtype)
        mean = yield from averaged(values, payload, codec, group, where)
        return payload.sparse_mean(where, mean)

    def _sketch(self, matrix: Tensor, step: int) -> Tensor:
        """The matrix times a random one, [rows, rank], in single precision at least."""
        rng = torch.Generator().manual_seed(SEED + step)
        draw = torch.randn(
            self.columns, self.rank, generator=rng, dtype=torch.float32, device="cpu"
        )
        wide = torch.promote_types(matrix.dtype, torch.float32)
        return matrix.to(wide) @ draw.to(matrix.device, wide)


def longest(sketch: Tensor, k: int) -> Tensor:
    """The k rows of [rows, rank] that are longest, ascending; NaN is longest.

    In steps that are rounded in the same way on every machine, and of equals the first.
    """
    length = torch.zeros_like(sketch[:, 0])
    for column in sketch.unbind(1):
        length += column * column
    length = length.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return length.sort(descending=True, stable=True).indices[:k].sort().values


def pays(n: int, k: int, sketched: int, size: int, codec: Codec) -> bool:
    """Whether the sketches (numbers) and k of n values are fewer bytes than n values.

    All of them travel in the two halves of a reduction.
    """
    wide = max(codec.dtype.itemsize, 4)
    return size > 1 and wide * sketched + codec.nbytes(k) < codec.nbytes(n)
