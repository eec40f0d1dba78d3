"""Hosts of several ranks: densely inside a host, by a collective between hosts.

[Note: levels] Rank l of a host sums part l of the bucket over the host's ranks. Then
the ranks with the same l average their part over the hosts, by any collective, and a
host's ranks tell each other the means. So a host's link carries what one rank would
send, however many ranks there are behind it.

No new state is needed. What the collective does not deliver stays in part l of rank l's
buffer, and the rest of that buffer is zero; in the next step it is summed with
everybody's new gradients. The collective works on the mean over the host's ranks, and
what it leaves is multiplied by their number: the law is about sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.core.devices import on_device
from gradtide.core.levels import Hosts, Levels, levels_of
from gradtide.core.ops import (
    AllGather,
    Flow,
    Group,
    Handover,
    ReduceScatter,
    Steps,
    ToHost,
)
from gradtide.core.payload import Collective, Payload, Traits, settled, traits, wire_of
from gradtide.wire import codec_of

FEW = 4  # times so many entries are as long as all values, or cost as much


@dataclass(frozen=True)
class TwoLevel:
    """Average inside each host first, then between hosts, see [Note: levels].

    Cost, with H hosts of L ranks: a reduce-scatter and an all-gather among the ranks of
    a host, of (L - 1) / L of the bucket each (of a sparse mean its entries are
    gathered), and the rounds and bytes of `collective` among H ranks for a bucket of
    1 / L of the length.

    Residual: that of `collective`, for the part of the bucket that is this rank's.

    Args:
        collective: What travels between hosts.
        hosts: The number of ranks on each host, 1 or more, where ranks are numbered
            host by host, as torchrun does. Otherwise the ranks of every host, as many
            for each. With 1, or where all ranks are on one host, the collective is
            asked as it is.

    Raises:
        ValueError: `hosts` is less than 1.
    """

    collective: Collective
    hosts: Hosts

    @property
    def traits(self) -> Traits:
        own = traits(self.collective)
        return Traits(dense=own.dense, rounds_off=own.rounds_off, transparent=True)

    def __post_init__(self) -> None:
        if isinstance(self.hosts, int) and self.hosts < 1:
            raise ValueError(f"TwoLevel(hosts={self.hosts}): 1 or more ranks on a host")

    def hands_over(self, size: int) -> bool:
        divisible = traits(settled(self.collective)).divisible
        return divisible and levels_of(Group(0, size), self.hosts) is not None

    def reduce(self, payload: Payload, group: Group) -> Flow:
        levels = levels_of(group, self.hosts)
        flow = self.collective.reduce
        if levels is None:
            return (yield from flow(payload, group))
        if not traits(settled(self.collective)).divisible:
            return (yield from levels.carried(flow(payload, group)))
        return (yield from self._by_parts(payload, levels))

    def _by_parts(self, payload: Payload, levels: Levels) -> Flow:
        flat = payload.flat
        own = _part(flat, levels)
        shard = _shard(payload, own)
        residual = traits(self.collective).residual
        if residual:
            # The parts of others are sums before anybody selects from them.
            wire = wire_of(settled(self.collective))
            payload.check_all_finite(codec_of(wire, flat.dtype).dtype)
        yield levels.inside(ReduceScatter(flat, mean=True))
        if payload.left is not None:
            yield levels.inside(ReduceScatter(payload.left, mean=True))
            shard.left = _part(payload.left, levels).clone()
        if residual:
            # The rest of the buffer is the business of the host's other ranks.
            begin = int(own.storage_offset() - flat.storage_offset())
            flat[:begin].zero_()
            flat[begin + len(own) :].zero_()
        yield Handover()
        empty = False
        try:
            flow = self.collective.reduce(shard, levels.outer)
            mean = yield from levels.between(flow)
            empty = mean.data_ptr() == own.data_ptr()
        finally:  # also of a flow that is closed at its cut
            if residual and not empty:
                own.mul_(levels.local)
            payload.num_sent += shard.num_sent * levels.local
            payload.nonfinite = payload.nonfinite + shard.nonfinite
            shard.num_sent, shard.nonfinite, shard.left = 0, 0.0, None
        yield Handover()
        # Nobody can count entries of what has no memory.
        if not (traits(self.collective).dense or flat.is_meta):
            found: Tensor | None = yield from _gather_entries(
                payload, None if empty else shard.entries_of(mean), mean, levels
            )
            if found is not None:
                return found
        whole, part = flat, own
        if not empty:
            whole = payload.mean_buffer()
            part = _part(whole, levels).copy_(mean)
        yield levels.inside(AllGather(part, into=whole))
        return whole


def _gather_entries(
    payload: Payload, where: Tensor | None, mean: Tensor, levels: Levels
) -> Steps:
    """The sparse mean of a host's parts, from its ranks' entries.

    None, on all of them, where any has no sparse mean, or there are too many entries.
    """
    found = -1 if where is None else len(where)
    count = on_device([found], torch.int64, mean.device)
    gathered: Tensor = yield levels.inside(AllGather(count))
    counts: list[int] = (yield ToHost(gathered)).flatten().tolist()
    if where is None or min(counts) < 0 or FEW * sum(counts) > payload.flat.numel():
        return None
    values = mean.index_select(0, where)
    where = (where + levels.place * mean.numel()).to(torch.int32)
    both = AllGather(where, counts), AllGather(values, counts)
    return payload.sparse_mean(*(yield tuple(map(levels.inside, both))))


def _part(x: Tensor, levels: Levels) -> Tensor:
    """This rank's part of what its host has, a view."""
    return x.view(levels.local, -1)[levels.place]


def _shard(payload: Payload, own: Tensor) -> Payload:
    """The payload of a part of the bucket, kept from step to step."""
    shard = payload.shard
    if shard is None or shard.flat.data_ptr() != own.data_ptr():
        pieces = _pieces(payload, own)
        shard = payload.shard = Payload(own, pieces, payload.state)
    begin = own.storage_offset() - payload.flat.storage_offset()

    def weigh(out: Tensor) -> None:
        out.copy_(payload.selection_scores[begin : begin + len(own)])

    shard.weigh = None if payload.weigh is None else weigh
    return shard


def _pieces(payload: Payload, own: Tensor) -> list[Tensor]:
    """What is in `own` of each of the bucket's tensors, as far as anything is."""
    first, pieces = int(own.storage_offset()), []
    for part in payload.parts:
        begin = max(int(part.storage_offset()) - first, 0)
        end = min(int(part.storage_offset()) - first + part.numel(), len(own))
        if begin < end:
            pieces.append(own[begin:end])
    return pieces


def by_levels(collective: Collective, hosts: Hosts | None) -> Collective:
    """The collective, between hosts of several ranks (None: of one)."""
    return collective if hosts in (None, 1) else TwoLevel(collective, hosts)
