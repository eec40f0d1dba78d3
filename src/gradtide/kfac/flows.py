"""How factors are summed, and how what was made of them is handed out.

Flows like those of the collectives, over buffers of their own, with one piece per
factor or layer: what travels here is no gradient, and is not counted as one. They know
sizes, owners and ranks; nothing of layers, inverses or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.ops import AllGather, AllReduce, AllToAll, Cut, Flow, Group, ReduceScatter


@dataclass(eq=False)
class Sum:
    """Sum packed factors in `flat` over all ranks, for everybody or for their owners.

    `sizes` are the lengths, in rank order, of what each rank owns of the buffer; None:
    everybody gets all. One all-reduce, 2 n (P - 1) / P elements a rank; or one
    reduce-scatter, half of that. With `wire` contributions are cast to that dtype once
    and added in the buffer's own. What a rank does not own is used up afterwards.

    `numbers` is a small tensor that travels along and is summed for everybody;
    `arrived` is called on the lane when both sums are there.
    """

    flat: Tensor
    sizes: Sequence[int] | None
    wire: torch.dtype | None
    numbers: Tensor | None
    arrived: Callable[[], None]

    def run(self, group: Group) -> Flow:
        if group.size > 1:
            yield from self._sum(self.flat, group)
        else:
            yield Cut(self.flat)  # what follows is not for the moment of launching
        self.arrived()
        return self.flat

    def _sum(self, x: Tensor, group: Group) -> Flow:
        # First: all messages of a small one are posted, and numbered, at once.
        along = () if self.numbers is None else (AllReduce(self.numbers),)
        if not x.numel():
            if along:
                yield along
        elif self.wire is not None:
            yield from self._sum_cast(x, self.wire, along, group)
        elif self.sizes is None:
            yield (*along, AllReduce(x))
        else:
            yield (*along, ReduceScatter(x, self.sizes))
        return x

    def _sum_cast(
        self, x: Tensor, dtype: torch.dtype, along: tuple[AllReduce, ...], group: Group
    ) -> Flow:
        """Direct messages: a ring would round the partial sums at every hop."""
        sizes = (
            split_evenly(x.numel(), group.size) if self.sizes is None else self.sizes
        )
        own = torch.split(x, list(sizes))[group.rank]
        everybody = [own.numel()] * group.size
        *_, rows = yield (*along, AllToAll(x.to(dtype), sizes, everybody))
        torch.sum(rows.view(group.size, -1), 0, dtype=x.dtype, out=own)
        if self.sizes is None:
            x.copy_((yield AllGather(own.to(dtype), sizes)))
        return x


def split_evenly(length: int, size: int) -> list[int]:
    """Lengths of `size` parts that differ by one at most."""
    return [length // size + (rank < length % size) for rank in range(size)]


@dataclass(frozen=True)
class Piece:
    """Something of `numel` elements that rank `source` has and `receivers` need."""

    numel: int
    source: int
    receivers: frozenset[int]  # without the source

    def meets(self, rank: int) -> bool:
        return rank == self.source or rank in self.receivers


class Share:
    """Hand out pieces, in one message to each rank that needs any.

    The flow turns at once: it holds where its bucket does, and makes its pieces after.
    `make` is called on the lane, may wait for what is being computed, and fills the
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
        self.to_all = all(
            {p.source, *p.receivers} == set(range(group.size)) for p in pieces
        )
        # Ordered by source, as an all-gather leaves it.
        order = sorted(range(len(pieces)), key=lambda i: pieces[i].source)
        met = [i for i in order if pieces[i].meets(group.rank)]
        lengths = [pieces[i].numel for i in met]
        self.flat = torch.zeros(sum(lengths), device=device)
        # By piece; only those that this rank has or needs.
        self.views = dict(zip(met, torch.split(self.flat, lengths), strict=True))

    def run(self, group: Group) -> Flow:
        yield Cut(self.flat)
        self.make()
        if self.pieces and group.size > 1:
            yield from (self._to_all if self.to_all else self._to_some)(group)
        self.take()
        return self.flat

    def _to_all(self, group: Group) -> Flow:
        sizes = [0] * group.size
        for piece in self.pieces:
            sizes[piece.source] += piece.numel
        end = sum(sizes[: group.rank + 1])
        own = self.flat[end - sizes[group.rank] : end]
        yield AllGather(own, sizes, into=self.flat)
        return self.flat

    def _to_some(self, group: Group) -> Flow:
        ranks = range(group.size)
        leaving = [self._between(group.rank, peer) for peer in ranks]
        arriving = [self._between(peer, group.rank) for peer in ranks]
        sent = [self.views[i] for row in leaving for i in row]
        rows: Tensor = yield AllToAll(
            torch.cat(sent) if sent else self.flat.new_empty(0),
            [sum(self.pieces[i].numel for i in row) for row in leaving],
            [sum(self.pieces[i].numel for i in row) for row in arriving],
        )
        got = [i for row in arriving for i in row]
        parts = torch.split(rows, [self.pieces[i].numel for i in got])
        for i, part in zip(got, parts, strict=True):
            self.views[i].copy_(part)
        return rows

    def _between(self, source: int, receiver: int) -> list[int]:
        return [
            i
            for i, piece in enumerate(self.pieces)
            if piece.source == source and receiver in piece.receivers
        ]
