"""How factors are summed, and how what was made of them is handed out.

Flows like those of the collectives, over buffers of their own, with one piece per
factor or layer: what travels here is no gradient, and is not counted as one. They know
sizes, owners and ranks; nothing of layers, inverses or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtide.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Cut,
    Flow,
    Group,
    ReduceScatter,
)


@dataclass(eq=False)
class Sum:
    """Sum packed factors in `flat` over all ranks, for everybody or for their owners.

    `sizes` are the lengths, in rank order, of what each rank owns of the buffer; None:
    everybody gets all. One all-reduce, 2 n (P - 1) / P elements a rank; or one
    reduce-scatter, half of that. With `wire` contributions are cast to that dtype once
    and added in the buffer's own. What a rank does not own is used up afterwards.

    `numbers` is a small tensor that travels along and is summed for everybody;
    `arrived` is called on the queue when both sums are there.
    """

    flat: Tensor
    sizes: Sequence[int] | None
    wire: torch.dtype | None
    numbers: Tensor | None
    arrived: Callable[[], None]

    def run(self, group: Group) -> Flow:
        if group.size > 1:
            # First: all messages of a small one are posted, and numbered, at once.
            along = () if self.numbers is None else (AllReduce(self.numbers),)
            if self.wire is not None:
                yield from self._sum_cast(self.flat, self.wire, along, group)
            elif self.sizes is None:
                yield (*along, AllReduce(self.flat))
            else:
                yield (*along, ReduceScatter(self.flat, self.sizes))
        else:
            yield Cut(self.flat)  # what follows is not for the moment of launching
        self.arrived()
        return self.flat

    def _sum_cast(
        self, x: Tensor, dtype: torch.dtype, along: tuple[AllReduce, ...], group: Group
    ) -> Flow:
        """Direct messages: a ring would round the partial sums at every hop."""
        sizes = self.sizes
        if sizes is None:  # even parts
            whole, rest = divmod(x.numel(), group.size)
            sizes = [whole + (rank < rest) for rank in range(group.size)]
        own = torch.split(x, list(sizes))[group.rank]
        everybody = [own.numel()] * group.size
        *_, rows = yield (*along, AllToAll(x.to(dtype), sizes, everybody))
        torch.sum(rows.view(group.size, -1), 0, dtype=x.dtype, out=own)
        if self.sizes is None:
            x.copy_((yield AllGather(own.to(dtype), sizes)))
        return x


@dataclass(frozen=True, eq=False)
class Piece:
    """Something of `numel` elements that rank `source` has and `receivers` need."""

    numel: int
    source: int
    receivers: frozenset[int]  # without the source
    of: Any = None  # what it is, for who made it


class Share:
    """Hand out pieces, in one message to each rank that needs any.

    The flow turns at once: it holds where its bucket does, and makes its pieces after.
    `make` is called on the queue, may wait for what is being computed, and fills the
    views of the pieces that this rank is the source of; `take` is called when the
    others are filled. If everybody needs everything, an all-gather of uneven parts, n
    (P - 1) / P elements a rank; otherwise an all-to-all.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        group: Group,
        device: torch.device,
        make: Callable[[], None],
        take: Callable[[], None],
    ) -> None:
        self.pieces, self.make, self.take = pieces, make, take
        ranks = {piece: {piece.source, *piece.receivers} for piece in pieces}
        self.to_all = all(len(met) == group.size for met in ranks.values())
        # Ordered by source, as an all-gather leaves it.
        order = sorted(pieces, key=lambda piece: piece.source)
        met = [piece for piece in order if group.rank in ranks[piece]]
        lengths = [piece.numel for piece in met]
        self.flat = torch.zeros(sum(lengths), device=device)
        # Only of those that this rank has or needs.
        self.views = dict(zip(met, torch.split(self.flat, lengths), strict=True))

    def run(self, group: Group) -> Flow:
        yield Cut(self.flat)
        self.make()
        if self.pieces and group.size > 1:
            yield from (self._to_all if self.to_all else self._to_some)(group)
        self.take()
        return self.flat

    def _to_all(self, group: Group) -> Flow:
        sizes = [
            sum(piece.numel for piece in self.pieces if piece.source == rank)
            for rank in range(group.size)
        ]
        own = torch.split(self.flat, sizes)[group.rank]
        yield AllGather(own, sizes, into=self.flat)
        return self.flat

    def _to_some(self, group: Group) -> Flow:
        ranks = range(group.size)
        leaving = [self._between(group.rank, peer) for peer in ranks]
        arriving = [self._between(peer, group.rank) for peer in ranks]
        sent = [self.views[piece] for row in leaving for piece in row]
        rows: Tensor = yield AllToAll(
            torch.cat(sent) if sent else self.flat.new_empty(0),
            [sum(piece.numel for piece in row) for row in leaving],
            [sum(piece.numel for piece in row) for row in arriving],
        )
        got = [piece for row in arriving for piece in row]
        parts = torch.split(rows, [piece.numel for piece in got])
        for piece, part in zip(got, parts, strict=True):
            self.views[piece].copy_(part)
        return rows

    def _between(self, source: int, receiver: int) -> list[Piece]:
        return [
            p for p in self.pieces if p.source == source and receiver in p.receivers
        ]
