"""Requests among all ranks, carried out host by host.

[Note: Host by host] What is asked of all ranks is asked of those of a host first, or
last, and in between of one rank on each host. So a host's link carries what one rank
would send, however many there are behind it. Of a sum each rank of a host has a part;
what is gathered or sent to all crosses a link once for every host, not for every rank.

[Note: Short messages] That takes two hops inside the host more. What has no more than
SHORT bytes goes to every rank directly: an estimate, see benchmarks/README.md, 25.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtide.core import ops
from gradtide.core.ops import Among, Flow, Group, Message, Op, Steps

# How many ranks each host has, numbered host by host; or which, for every host alike.
Members: TypeAlias = tuple[tuple[int, ...], ...]  # the ranks of every host
Hosts: TypeAlias = int | Members
SHORT = 1 << 10  # bytes, of all that is summed or gathered


class Levels:
    """This rank's place in its host, and its host's among the hosts."""

    def __init__(self, group: Group, hosts: Hosts) -> None:
        self.group = group
        self.table = table = rows(group.size, hosts)
        (host,) = (i for i, row in enumerate(table) if group.rank in row)
        self.place = table[host].index(group.rank)
        self.outer = Group(host, len(table))
        self._inside = table[host]
        self._across = [row[self.place] for row in table]

    @property
    def local(self) -> int:
        """The number of ranks on each host."""
        return len(self._inside)

    def inside(self, op: Message) -> Among:
        """Ask the ranks of this host."""
        return Among(op, self._inside, inside=True)

    def across(self, op: Message) -> Among:
        """Ask the ranks with this place on all hosts."""
        return Among(op, self._across)

    def between(self, flow: Flow) -> Flow:
        """Drive a flow that is made for the hosts (`outer`)."""
        return ops.driven(flow, self._outward)

    def carried(self, flow: Flow) -> Flow:
        """Drive a flow that is made for all ranks, see [Note: Host by host]."""
        return ops.driven(flow, self._by_hosts)

    # - Requests -----------------------------------------------------------------------

    def _outward(self, asked: Op | tuple[Op, ...]) -> Steps:
        if isinstance(asked, tuple):
            return (yield tuple(map(self._outward_of, asked)))
        return (yield self._outward_of(asked))

    def _outward_of(self, op: Op) -> Op:
        if isinstance(op, ops.Cut | ops.ToHost | ops.Handover):
            return op
        assert not isinstance(op, Among), "hosts have no levels of their own"
        return self.across(op)

    def _by_hosts(self, asked: Any) -> Steps:
        if isinstance(asked, tuple):  # one after the other
            answers: list[Any] = []
            for op in asked:
                answers.append((yield from self._by_hosts(op)))
            return tuple(answers)
        match asked:
            case _ if _whole(asked, self.group) <= SHORT:
                pass
            case ops.AllReduce(tensor=x):
                return (yield from self._all_reduce(x))
            case ops.Mean():
                return (yield from self.carried(ops.halves(asked, self.group)))
            case ops.ReduceScatter():
                return (yield from self._reduce_scatter(asked))
            case ops.AllGather():
                return (yield from self._all_gather(asked))
            case ops.Broadcast(tensor=x, source=source):
                return (yield from self._broadcast(x, source))
        return (yield asked)

    def _all_reduce(self, x: Tensor) -> Flow:
        short = -x.numel() % self.local
        padded = torch.nn.functional.pad(x.flatten(), (0, short))
        own = yield self.inside(ops.ReduceScatter(padded))
        yield self.across(ops.AllReduce(own))
        yield self.inside(ops.AllGather(own, into=padded))
        return x.copy_(padded[: x.numel()].view(x.shape))

    def _reduce_scatter(self, op: ops.ReduceScatter) -> Flow:
        sizes = ops.part_sizes(op, self.group)
        x, own = self.by_place(op.tensor, sizes), torch.split(op.tensor, sizes)
        part = yield self.inside(ops.ReduceScatter(x, self.shares(sizes)))
        part = yield self.across(ops.ReduceScatter(part, self.column(sizes)))
        if op.mean:
            part.div_(self.group.size)
        return own[self.group.rank].copy_(part)

    def _all_gather(self, op: ops.AllGather) -> Flow:
        sizes = ops.part_sizes(op, self.group)
        there, here = self.column(sizes), self.shares(sizes)
        own = op.tensor.flatten()
        part = yield self.across(ops.AllGather(own, there, own.new_empty(sum(there))))
        x = yield self.inside(ops.AllGather(part, here, own.new_empty(sum(here))))
        order = [rank for place in zip(*self.table, strict=True) for rank in place]
        parts = torch.split(x, [sizes[rank] for rank in order])
        pieces = dict(zip(order, parts, strict=True))
        whole = torch.cat([pieces[rank] for rank in range(self.group.size)])
        if op.into is not None:
            return op.into.copy_(whole)
        shape = (-1, *op.tensor.shape)
        return whole if op.sizes is not None else whole.view(shape)

    def _broadcast(self, x: Tensor, source: int) -> Flow:
        """From the source to one rank on each host, in a chain; then inside."""
        (host,) = (i for i, row in enumerate(self.table) if source in row)
        place, flat = self.table[host].index(source), x.view(-1)
        nothing = flat[:0]
        sizes = [0] * len(self.table)
        if place == self.place:
            sizes[host] = flat.numel()
        own = flat if place == self.place and host == self.outer.rank else nothing
        into = flat if place == self.place else nothing
        yield self.across(ops.AllGather(own, sizes, into))
        yield self.inside(ops.Broadcast(flat, place))
        return x

    # - Parts --------------------------------------------------------------------------

    def column(self, sizes: Sequence[int]) -> list[int]:
        """Of the ranks with this place, host by host."""
        return [sizes[rank] for rank in self._across]

    def shares(self, sizes: Sequence[int]) -> list[int]:
        """Of what goes to all hosts, what each place of a host has."""
        columns = zip(*self.table, strict=True)
        return [sum(sizes[rank] for rank in column) for column in columns]

    def by_place(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Parts in the order of ranks, copied in that of places, then hosts."""
        parts = torch.split(x, list(sizes))
        columns = zip(*self.table, strict=True)
        return torch.cat([parts[rank] for column in columns for rank in column])


def alike(members: Members) -> Hosts:
    """Hosts of as many ranks each: those that have more are taken for several."""
    local = math.gcd(*map(len, members))
    cut = [host[i : i + local] for host in members for i in range(0, len(host), local)]
    found = tuple(sorted(cut))
    return local if found == rows(sum(map(len, members)), local) else found


def rows(size: int, hosts: Hosts) -> Members:
    """The ranks of every host. Raises ValueError where that cannot be."""
    if isinstance(hosts, int):
        if hosts < 1 or size % hosts:
            raise ValueError(f"{size} ranks are not hosts of {hosts} each")
        return tuple(tuple(range(i, i + hosts)) for i in range(0, size, hosts))
    lengths = {len(row) for row in hosts}
    if len(lengths) != 1 or sorted(r for row in hosts for r in row) != [*range(size)]:
        raise ValueError(
            f"{hosts} does not name each of {size} ranks once, as many for every host"
        )
    return hosts


def levels_of(group: Group, hosts: Hosts | None) -> Levels | None:
    """The levels of some ranks; None where there is one, or hosts are not known.

    Raises ValueError where such hosts cannot be.
    """
    if hosts is None:
        return None
    found = Levels(group, hosts)
    return found if found.local > 1 and found.outer.size > 1 else None


def _whole(op: Op, group: Group) -> float:
    """Bytes of all that is asked for; none of what is no business of all ranks."""
    if isinstance(op, ops.AllGather):
        return sum(ops.part_sizes(op, group)) * op.tensor.element_size()
    if isinstance(op, ops.AllReduce | ops.Mean | ops.ReduceScatter | ops.Broadcast):
        return op.tensor.nbytes
    return 0
