"""How factors are summed, and how what was made of them is handed out.

Flows like those of the collectives, over buffers of their own, with one piece per
factor or layer: what travels here is no gradient, and is not counted as one. They know
sizes, owners and ranks; nothing of layers, inverses or threads. Where hosts have
several ranks, whoever drives them carries sums and gathers out host by host, and direct
messages go host by host here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtide.core.levels import Levels
from gradtide.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Cut,
    Flow,
    Group,
    Op,
    ReduceScatter,
    Steps,
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

    def run(self, group: Group, levels: Levels | None = None) -> Flow:
        if group.size > 1:
            # First: all messages of a small one are posted, and numbered, at once.
            along = () if self.numbers is None else (AllReduce(self.numbers),)
            if self.wire is not None:
                yield from self._sum_cast(self.wire, along, group, levels)
            elif self.sizes is None:
                yield (*along, AllReduce(self.flat))
            else:
                yield (*along, ReduceScatter(self.flat, self.sizes))
        else:
            yield Cut(self.flat)  # what follows is not for the moment of launching
        self.arrived()
        return self.flat

    def _sum_cast(
        self,
        dtype: torch.dtype,
        along: tuple[AllReduce, ...],
        group: Group,
        levels: Levels | None,
    ) -> Steps:
        """Direct messages: a ring would round the partial sums at every hop."""
        x, sizes = self.flat, self.sizes
        if sizes is None:  # even parts
            whole, rest = divmod(x.numel(), group.size)
            sizes = [whole + (rank < rest) for rank in range(group.size)]
        own = torch.split(x, list(sizes))[group.rank]
        if levels is None:
            yield from _sum_cast(x, sizes, dtype, along, group)
        else:
            if along:
                yield along
            rows = levels.by_place(x, sizes)
            part = yield levels.inside(ReduceScatter(rows, levels.shares(sizes)))
            flow = _sum_cast(part, levels.column(sizes), dtype, (), levels.outer)
            own.copy_((yield from levels.between(flow)))
        if self.sizes is None:
            x.copy_((yield AllGather(own.to(dtype), sizes)))


def _sum_cast(
    x: Tensor,
    sizes: Sequence[int],
    dtype: torch.dtype,
    along: tuple[AllReduce, ...],
    group: Group,
) -> Flow:
    """Sum the ranks' parts, cast, each in its owner's memory; returns this rank's."""
    own = torch.split(x, list(sizes))[group.rank]
    everybody = [own.numel()] * group.size
    *_, rows = yield (*along, AllToAll(x.to(dtype), sizes, everybody))
    torch.sum(rows.view(group.size, -1), 0, dtype=x.dtype, out=own)
    return own


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
        self.flat = torch.zeros(sum(lengths), device=device, dtype=torch.float32)
        # Only of those that this rank has or needs.
        self.views = dict(zip(met, torch.split(self.flat, lengths), strict=True))

    def run(self, group: Group, levels: Levels | None = None) -> Flow:
        yield Cut(self.flat)
        self.make()
        if self.pieces and group.size > 1:
            if self.to_all:
                yield from self._to_all(group)
            elif levels is None:
                yield from self._to_some(group)
            else:
                yield from self._by_hosts(levels)
        self.take()
        return self.flat

    def _to_all(self, group: Group) -> Steps:
        sizes = [
            sum(piece.numel for piece in self.pieces if piece.source == rank)
            for rank in range(group.size)
        ]
        own = torch.split(self.flat, sizes)[group.rank]
        yield AllGather(own, sizes, into=self.flat)

    def _to_some(self, group: Group) -> Steps:
        ranks = [(rank,) for rank in range(group.size)]
        own = ranks[group.rank]
        leaving = [self._between(own, peer) for peer in ranks]
        arriving = [self._between(peer, own) for peer in ranks]
        self._fill((yield from self._exchange(leaving, arriving, self.views)))

    def _by_hosts(self, levels: Levels) -> Steps:
        """To one rank of each host that has receivers, who tells those."""
        table, rank = levels.table, levels.group.rank
        here, own = table[levels.outer.rank], (rank,)
        column = [row[levels.place] for row in table]
        others = [row if row is not here else () for row in table]
        leaving = [self._between(own, row) for row in others]
        arriving = [self._between((r,), here) if r != rank else [] for r in column]
        came = yield from self._exchange(leaving, arriving, self.views, levels.across)
        held = {**self.views, **came}
        # What a rank of this host has for another: its own, or what came to it.
        columns = list(zip(*table, strict=True))
        peers = [(peer,) if peer != rank else () for peer in here]
        leaving = [self._between(column, peer) for peer in peers]
        arriving = [self._between(c, own) if rank not in c else [] for c in columns]
        found = yield from self._exchange(leaving, arriving, held, levels.inside)
        self._fill(found)
        self._fill({p: part for p, part in came.items() if rank in p.receivers})

    def _between(
        self, sources: Collection[int], receivers: Collection[int]
    ) -> list[Piece]:
        """What any of these ranks has for any of those."""
        return [
            piece
            for piece in self.pieces
            if piece.source in sources and not piece.receivers.isdisjoint(receivers)
        ]

    def _exchange(
        self,
        leaving: Sequence[Sequence[Piece]],
        arriving: Sequence[Sequence[Piece]],
        held: Mapping[Piece, Tensor],
        among: Callable[[AllToAll], Op] = lambda op: op,
    ) -> Steps:
        """Send pieces to every rank, and return those that come from every rank."""
        sent = [held[piece] for row in leaving for piece in row]
        got = [piece for row in arriving for piece in row]
        rows = yield among(
            AllToAll(
                torch.cat(sent) if sent else self.flat.new_empty(0),
                [sum(piece.numel for piece in row) for row in leaving],
                [sum(piece.numel for piece in row) for row in arriving],
            )
        )
        parts = torch.split(rows, [piece.numel for piece in got])
        return dict(zip(got, parts, strict=True))

    def _fill(self, found: Mapping[Piece, Tensor]) -> None:
        for piece, part in found.items():
            self.views[piece].copy_(part)
