"""The largest entries of the sum, found by merging two ranks' at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtide.bucket import Payload, Traits, rounded_off
from gradtide.collectives._entries import (
    Entries,
    Steps,
    Wire,
    check,
    entry_words,
    length,
    pack,
    unpack,
    wire_dtype,
)
from gradtide.collectives.dense import Dense
from gradtide.collectives.topk import kept, summed
from gradtide.ops import AllToAll, Flow, Group, Swap
from gradtide.select import Selector, Threshold


@dataclass(frozen=True)
class GTopK(Traits):
    """gTop-k (Shi et al., ICDCS 2019): a butterfly of swaps; of each sum of two
    messages the k largest entries go on.

    log2(P) messages of k entries a rank (1.5 k words for float32, k for `wire`), all of
    one length. If P is no power of two, the ranks beyond it hand their entries to a
    partner first and are sent the result at the end: two messages more in a row.

    Leaves behind what was not selected, and what a merge dropped: every rank takes back
    the stake that it had in a dropped sum, also if the same index survives in another
    branch of the butterfly (the published rule loses it). The stakes of ranks beyond
    the power of two, and what `wire` takes off sums, by rounding or as too large for
    it, are kept by one of those who hold the sum. Buckets for which it does not pay
    (`pays`) are exchanged by `Dense`.
    """

    density: float = 0.01
    select: Selector = Threshold()  # noqa: RUF009  (frozen: not shared by mistake)
    wire: Wire = None

    def __post_init__(self) -> None:
        check("GTopK", self.density, self.wire)

    def pays_below(self, size: int) -> float:
        dense = 2 * (size - 1) / size
        return dense / (rounds(size) * entry_words(torch.float32, self.wire))

    def reduce(self, load: Payload, group: Group) -> Flow:
        n, k = len(load.flat), kept(self.density, len(load.flat))
        dtype = load.flat.dtype
        if not pays(n, k, group.size, dtype, self.wire):
            return (yield from Dense(self.wire).reduce(load, group))
        x = load.salience
        where = at_most(k, self.select(x, k, load.state), x)
        values = load.take(where, wire_dtype(dtype, self.wire))
        merging = _Merging(load, k, self.wire, (where, values))
        where, sums = yield from _all_merged(merging, group)
        return load.mean_at(where, sums / group.size)


def pays(n: int, k: int, size: int, dtype: torch.dtype, wire: Wire = None) -> bool:
    """Whether the messages in a row are shorter than those of a dense exchange.

    `rounds` messages of k entries against 2 n (P - 1) / P values, both in `wire`.
    """
    narrow = wire_dtype(dtype, wire)
    dense = 2 * n * (size - 1) * narrow.itemsize
    return size > 1 and rounds(size) * length(k, n, narrow) * size < dense


def rounds(size: int) -> int:
    """Messages in a row: log2 of the power of two, and two for ranks beyond it."""
    core = _core(size)
    return core.bit_length() - 1 + (2 if core < size else 0)


def at_most(k: int, where: Tensor, x: Tensor) -> Tensor:
    """Of the indices `where` those of the k largest entries of `x`."""
    return where if len(where) <= k else where[largest(x[where], k)]


def largest(values: Tensor, k: int) -> Tensor:
    """Where (bool) the k largest magnitudes are; of equal ones, the first.

    By comparison with the k-th alone: the same on every kind of machine.
    """
    if len(values) <= k:
        return torch.ones_like(values, dtype=torch.bool)
    sizes = values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    least = torch.kthvalue(sizes, len(sizes) - k + 1).values
    above, equal = sizes > least, sizes == least
    return above | (equal & (equal.cumsum(0) <= k - above.sum()))


@dataclass
class _Merging:
    """A partial sum of some ranks' entries, and what this rank has at stake in it."""

    load: Payload
    k: int
    wire: Wire
    total: Entries
    stakes: list[Entries] = field(init=False)

    def __post_init__(self) -> None:
        self.stakes = [self.total]

    def message(self) -> Tensor:
        """The sum as k entries: zeros at its last index make up for missing ones."""
        where, values = self.total
        missing = self.k - len(where)
        if missing:
            where = torch.cat([where, where[-1:].expand(missing)])
            values = torch.cat([values, values.new_zeros(missing)])
        return pack(where, values, len(self.load.flat), self._dtype)

    def read(self, message: Tensor) -> Entries:
        where, values = unpack(message, self.k, len(self.load.flat), self._dtype)
        return where, values.to(self.load.flat.dtype)

    def merge(self, theirs: Entries, first: bool, keeper: bool) -> None:
        """Add `theirs` (in front of the own sum if not `first`), and keep k entries.

        The `keeper` keeps what is rounded off: one of the ranks that hold the sum.
        """
        pair = (self.total, theirs) if first else (theirs, self.total)
        where, sums = summed(pair, self.load.flat.dtype)
        keep = largest(sums, self.k)
        where, sums = where[keep], sums[keep]
        self._settle(where)
        self.total = where, sums
        if self._dtype != sums.dtype:
            narrow = _fitting(sums, self._dtype).to(sums.dtype)
            self.total = where, narrow
            if keeper:
                rest = rounded_off(sums, narrow)
                self.load.give_back(where, rest)
                # Whoever has a stake in this sum has one in the rest, too.
                self.stakes.append((where, -rest))

    @property
    def _dtype(self) -> torch.dtype:
        return wire_dtype(self.load.flat.dtype, self.wire)

    def _settle(self, survivors: Tensor) -> None:
        """Take back the stakes in what was dropped."""
        remaining = []
        for where, values in self.stakes:
            place = torch.searchsorted(survivors, where).clamp_(max=len(survivors) - 1)
            stays = survivors[place] == where
            self.load.give_back(where[~stays], values[~stays])
            remaining.append((where[stays], values[stays]))
        self.stakes = remaining


def _all_merged(merging: _Merging, group: Group) -> Steps:
    """The entries that survive all merges, the same on every rank."""
    rank, size = group
    core = _core(size)
    if core < size:
        message = yield _handed(merging.message(), group, rank - core, rank + core)
        if rank + core < size:
            theirs = merging.read(message)
            merging.stakes.append(theirs)
            merging.merge(theirs, first=True, keeper=True)
    distance = 1
    while distance < core:
        # Whoever is beyond the power of two swaps with itself: nothing travels.
        peer = rank ^ distance if rank < core else rank
        message = yield Swap(merging.message(), peer)
        if rank < core:
            keeper = rank % (2 * distance) == 0
            merging.merge(merging.read(message), rank < peer, keeper)
        distance *= 2
    if core < size:
        message = yield _handed(merging.message(), group, rank + core, rank - core)
        if rank >= core:
            return _distinct(*merging.read(message))
    return merging.total


def _fitting(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums as `dtype`; what is finite stays so, as the largest number at most."""
    most = torch.finfo(dtype).max
    return torch.where(sums.isinf(), sums, sums.clamp(-most, most)).to(dtype)


def _core(size: int) -> int:
    """The largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def _handed(message: Tensor, group: Group, to: int, source: int) -> AllToAll:
    """`message` for rank `to`, and one as long from `source`, where there are such."""
    send = [len(message) * (r == to) for r in range(group.size)]
    recv = [len(message) * (r == source) for r in range(group.size)]
    return AllToAll(message[: sum(send)], send, recv)


def _distinct(where: Tensor, values: Tensor) -> Entries:
    """Entries without those that were added to make a message as long as others."""
    new = torch.ones_like(where, dtype=torch.bool)
    new[1:] = where[1:] != where[:-1]
    return where[new], values[new]
