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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradtide.collectives._entries import Steps
from gradtide.core.ops import (
    AllGather,
    AllReduce,
    Among,
    Cut,
    Flow,
    Group,
    Op,
    ReduceScatter,
    ToHost,
)
from gradtide.core.payload import Collective, Payload, Traits, settled, traits
from gradtide.wire import codec_of


@dataclass(frozen=True)
class TwoLevel(Traits):
    """Average inside each host first, then between hosts, see [Note: levels].

    Cost, with H hosts of L ranks: a reduce-scatter and an all-gather among the ranks of
    a host, of (L - 1) / L of the bucket each, and the rounds and bytes of `collective`
    among H ranks for a bucket of 1 / L of the length.

    Residual: that of `collective`, for the part of the bucket that is this rank's.

    Args:
        collective: What travels between hosts.
        local: The number of ranks on each host, 1 or more. Ranks are numbered host by
            host, as torchrun does. With 1, or where all ranks are on one host, the
            collective is asked as it is.

    Raises:
        ValueError: `local` is less than 1.
    """

    collective: Collective
    local: int

    transparent = True

    @property
    def dense(self) -> bool:  # type: ignore[override]
        return traits(self.collective).dense

    @property
    def residual(self) -> bool:
        return traits(self.collective).residual

    def dense_next(self, state: dict[str, Tensor]) -> bool:
        return traits(self.collective).dense_next(state)

    def dense_last(self, state: dict[str, Tensor]) -> bool:
        return traits(self.collective).dense_last(state)

    def __post_init__(self) -> None:
        if self.local < 1:
            raise ValueError(f"TwoLevel(local={self.local}): 1 or more ranks on a host")

    def reduce(self, payload: Payload, group: Group) -> Flow:
        hosts, rest = divmod(group.size, self.local)
        if rest:
            raise ValueError(f"{group.size} ranks are not hosts of {self.local} each")
        if self.local == 1 or hosts == 1:
            return (yield from self.collective.reduce(payload, group))
        levels = _Levels(group, self.local)
        if not traits(settled(self.collective)).divisible:
            flow = self.collective.reduce(payload, group)
            return (yield from _driven(flow, partial(_by_levels, levels=levels)))
        return (yield from self._by_parts(payload, levels))

    def _by_parts(self, payload: Payload, levels: _Levels) -> Flow:
        flat, own = payload.flat, levels.part(payload.flat)
        shard = _shard(payload, own)
        residual = traits(self.collective).residual
        if residual:
            # The parts of others are sums before anybody selects from them.
            wire = getattr(settled(self.collective), "wire", None)
            payload.check_all_finite(codec_of(wire, flat.dtype).dtype)
        yield levels.inside(ReduceScatter(flat))
        own.div_(self.local)
        if residual:
            _clear_others(flat, own)
        empty = False
        try:
            flow = self.collective.reduce(shard, levels.outer)
            mean = yield from _driven(flow, partial(_across, levels=levels))
            empty = mean.data_ptr() == own.data_ptr()
        finally:  # also of a flow that is closed at its cut
            if residual and not empty:
                own.mul_(self.local)
            payload.num_sent += shard.num_sent * self.local
            payload.nonfinite = payload.nonfinite + shard.nonfinite
            shard.num_sent, shard.nonfinite = 0, 0.0
        whole, part = flat, own
        if not empty:
            whole = payload.mean_buffer()
            part = levels.part(whole).copy_(mean)
        yield levels.inside(AllGather(part, into=whole))
        return whole


class _Levels:
    """This rank's place in its host, and its host's among the hosts."""

    def __init__(self, group: Group, local: int) -> None:
        self.group, self.hosts = group, group.size // local
        host, self.place = divmod(group.rank, local)
        self.outer = Group(host, self.hosts)
        self._inside = range(host * local, (host + 1) * local)
        self._across = range(self.place, group.size, local)

    @property
    def local(self) -> int:
        return len(self._inside)

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of what its host has, a view."""
        return x.view(self.local, -1)[self.place]

    def inside(self, op: Any) -> Among:
        return Among(op, self._inside, inside=True)

    def across(self, op: Any) -> Among:
        return Among(op, self._across)


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


def _clear_others(flat: Tensor, own: Tensor) -> None:
    """Set to zero what is the business of the host's other ranks."""
    begin = int(own.storage_offset() - flat.storage_offset())
    flat[:begin].zero_()
    flat[begin + len(own) :].zero_()


def _driven(flow: Flow, carried: Callable[[Any], Steps]) -> Flow:
    """A flow each of whose requests is carried out by another one."""
    answer: Any = None
    try:
        while True:
            answer = yield from carried(flow.send(answer))
    except StopIteration as stop:
        result: Tensor = stop.value
        return result
    finally:
        flow.close()


def _across(asked: Any, levels: _Levels) -> Steps:
    """Ask the owners of the same part on other hosts."""
    if isinstance(asked, tuple):
        return (yield tuple(_outer(op, levels) for op in asked))
    return (yield _outer(asked, levels))


def _outer(op: Op, levels: _Levels) -> Op:
    return op if isinstance(op, Cut | ToHost) else levels.across(op)


def _by_levels(asked: Any, levels: _Levels) -> Steps:
    """Ask all ranks, for sums and gathers inside hosts first, or last."""
    match asked:
        case AllReduce(tensor=x):
            return (yield from _all_reduce(x, levels))
        case ReduceScatter(tensor=x) if _even(asked):
            return (yield from _reduce_scatter(x, levels))
        case AllGather() if _even(asked):
            return (yield from _all_gather(asked, levels))
    return (yield asked)


def _all_reduce(x: Tensor, levels: _Levels) -> Flow:
    short = -x.numel() % levels.local
    padded = torch.nn.functional.pad(x.flatten(), (0, short))
    own = yield levels.inside(ReduceScatter(padded))
    yield levels.across(AllReduce(own))
    yield levels.inside(AllGather(own, into=padded))
    return x.copy_(padded[: x.numel()].view(x.shape))


def _reduce_scatter(x: Tensor, levels: _Levels) -> Flow:
    """Parts in rank order: of each host, that of this rank's place comes here."""
    rows = x.view(levels.hosts, levels.local, -1).transpose(0, 1).flatten()
    own = yield levels.inside(ReduceScatter(rows))
    part = yield levels.across(ReduceScatter(own))
    return x.view(levels.group.size, -1)[levels.group.rank].copy_(part)


def _all_gather(op: AllGather, levels: _Levels) -> Flow:
    part = op.tensor.flatten()
    own = yield levels.across(AllGather(part, into=_room(part, levels.hosts)))
    whole = yield levels.inside(AllGather(own, into=_room(own, levels.local)))
    rows = whole.view(levels.local, levels.hosts, -1).transpose(0, 1)
    if op.into is not None:
        op.into.view(rows.shape).copy_(rows)
        return op.into
    together: Tensor = rows.flatten()
    return together if op.sizes is not None else together.view(-1, *op.tensor.shape)


def _even(op: ReduceScatter | AllGather) -> bool:
    return op.sizes is None or len(set(op.sizes)) == 1


def _room(x: Tensor, times: int) -> Tensor:
    return x.new_empty(times * x.numel())


def by_levels(collective: Collective, local: int | None) -> Collective:
    """The collective, between hosts that have `local` ranks each (None: one)."""
    return collective if local in (None, 1) else TwoLevel(collective, local)
