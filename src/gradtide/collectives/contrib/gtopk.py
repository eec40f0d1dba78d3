"""The largest entries of the sum, found by merging two ranks' at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtide.collectives import _entries
from gradtide.collectives._entries import Entries, Selecting, Steps, filled_up, kept
from gradtide.collectives.dense import Dense, pays
from gradtide.core.ops import AllToAll, Flow, Group, Swap
from gradtide.core.payload import Payload
from gradtide.wire import codec_of


@dataclass(frozen=True)
class GTopK(Selecting):
    """Merge entries of two ranks at a time, and keep the k largest of each sum.

    This is gTop-k (Shi et al., A distributed synchronous SGD algorithm with global
    top-k sparsification for low bandwidth networks, ICDCS 2019). Ranks swap messages
    along a butterfly.

    Cost, with P ranks: log2(P) rounds of one message of k entries: at a density of 0.01
    5.1 k bytes each for float32, 3.1 k with `wire`. If P is no power of two, the ranks
    beyond it hand their entries to a partner first and get the result at the end: two
    rounds more.

    Residual: what the rank did not select, and its stake in what a merge dropped. A
    rank takes its stake back also if the same index survives in another branch of the
    butterfly, where the published rule loses it. The stakes of ranks beyond the power
    of two, and what `wire` takes off sums, are kept by one of those who hold the sum.

    Args:
        density: The share of a bucket's entries that a rank selects, see `Selecting`.
        select: The selector that finds the entries, see `Selecting`.
        wire: In what values travel, see `Selecting`. What that takes off goes to the
            residual; a sum that is too large for the cast is cut
            to the largest number there is.

    Raises:
        ValueError: A field is outside its range.
    """

    def pays_below(self, size: int) -> float:
        dense = 2 * (size - 1) / size
        return _entries.density_of_share(dense / rounds(size), self.wire)

    def reduce(self, payload: Payload, group: Group) -> Flow:
        n, k = len(payload.flat), kept(self.density, len(payload.flat))
        codec = codec_of(self.wire, payload.flat.dtype)
        encoding = _entries.Encoding(n, codec, payload.flat.dtype)
        if not pays(rounds(group.size) * encoding.length(k), n, group.size, codec):
            return (yield from Dense(self.wire).reduce(payload, group))
        x = payload.selection_scores
        where = at_most(k, self.select(x, k, payload.state), x)
        own = filled_up((where, payload.pop_entries(where, codec.dtype)), k)
        merging = _Merging(payload, k, encoding, own)
        if not codec.exact:
            payload.add_residual(own[0], merging.hold(own))
        merging.stakes = [merging.total]
        where, sums = yield from _all_merged(merging, group)
        return payload.sparse_mean(where, sums / group.size)


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
    """A partial sum of some ranks' entries, and what this rank has at stake in it.

    It has k entries, as the codec holds them: zeros at the last index, or what the
    codec made of them, make up for those that are missing. What a codec rounds is coded
    once, and that is sent: coded again it could be something else, in half precision.
    """

    payload: Payload
    k: int
    encoding: _entries.Encoding
    total: Entries
    stakes: list[Entries] = field(default_factory=list)
    coded: Tensor | None = None

    def message(self) -> Tensor:
        """The sum, as k entries."""
        if self.coded is not None:
            return self.coded
        where, values = self.total
        return self.encoding.pack((where, values.clone()))

    def hold(self, total: Entries) -> Tensor:
        """Have k entries for the sum, coded; returns what that takes off."""
        where, rest = total[0], total[1].clone()
        self.coded = self.encoding.pack((where, rest))
        self.total = where, self.read(self.coded)[1]
        return rest

    def read(self, message: Tensor) -> Entries:
        return self.encoding.unpack(message, self.k)

    def merge(self, theirs: Entries, first: bool, keeper: bool) -> None:
        """Add `theirs` (in front of the own sum if not `first`), and keep k entries.

        The `keeper` keeps what is rounded off: one of the ranks that hold the sum.
        """
        pair = (self.total, theirs) if first else (theirs, self.total)
        where, sums = _entries.summed(pair, self.encoding.dtype)
        keep = largest(sums, self.k)
        self._settle(where[keep])
        where, sums = self.total = filled_up((where[keep], sums[keep]), self.k)
        codec = self.encoding.codec
        if not codec.exact:
            # What is finite stays so: the largest number at most.
            kinds = (codec.dtype, sums.dtype)
            most = min(torch.finfo(dtype).max for dtype in kinds)
            narrow = torch.where(sums.isinf(), sums, sums.clamp(-most, most))
            rest = (sums - narrow).nan_to_num_(0.0, 0.0, 0.0)
            rest += self.hold((where, narrow))
            if keeper:
                self.payload.add_residual(where, rest)
                # Whoever has a stake in this sum has one in the rest, too.
                self.stakes.append((where, -rest))

    def _settle(self, survivors: Tensor) -> None:
        """Take back the stakes in what was dropped."""
        remaining = []
        for where, values in self.stakes:
            place = torch.searchsorted(survivors, where).clamp_(max=len(survivors) - 1)
            stays = survivors[place] == where
            self.payload.add_residual(where[~stays], values[~stays])
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
    total = merging.total
    if core < size:
        message = yield _handed(merging.message(), group, rank + core, rank - core)
        if rank >= core:
            total = merging.read(message)
    return _entries.summed([total], merging.encoding.dtype)


def _core(size: int) -> int:
    """The largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def _handed(message: Tensor, group: Group, to: int, source: int) -> AllToAll:
    """`message` for rank `to`, and one as long from `source`, where there are such."""
    send = [len(message) * (r == to) for r in range(group.size)]
    recv = [len(message) * (r == source) for r in range(group.size)]
    return AllToAll(message[: sum(send)], send, recv)
