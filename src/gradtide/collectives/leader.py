"""One rank, each in turn, chooses the entries that all average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.bucket import Payload, Traits, count
from gradtide.collectives._entries import Steps, Wire, check, wire_dtype
from gradtide.collectives.dense import Dense
from gradtide.collectives.gtopk import at_most
from gradtide.collectives.topk import kept
from gradtide.ops import AllReduce, Broadcast, Flow, Group
from gradtide.select import Selector, Threshold
from gradtide.select.kernels import index_dtype

SMALL = 1 << 14  # bytes up to which an all-reduce in one hop beats two halves


@dataclass(frozen=True)
class Leader(Traits):
    """CLT-k (Chen et al., NeurIPS 2020): the k largest entries of one rank, the next
    rank at every step, are averaged over all.

    A broadcast of k indices (int32) and a dense exchange of k values: k + 2 k (P - 1) /
    P words, whatever P, and one selection in P steps for each rank. What the others
    have elsewhere waits for their turn: fidelity is what it gives up. Leaves behind all
    but the chosen entries, on every rank. Buckets for which it does not pay (`pays`)
    are exchanged by `Dense`.

    With `wire` values travel as in `Dense`, but what is rounded off contributions stays
    behind; what is rounded off the mean is lost.
    """

    density: float = 0.01
    select: Selector = Threshold()  # noqa: RUF009  (frozen: not shared by mistake)
    wire: Wire = None

    small = SMALL

    def __post_init__(self) -> None:
        check("Leader", self.density, self.wire)

    def reduce(self, load: Payload, group: Group) -> Flow:
        n, k = len(load.flat), kept(self.density, len(load.flat))
        if not pays(n, k, group.size, load.flat.dtype, self.wire):
            return (yield from Dense(self.wire).reduce(load, group))
        small = k * load.flat.itemsize <= SMALL
        dtype = wire_dtype(load.flat.dtype, None if small else self.wire)
        where = yield from self._chosen(load, k, dtype, group)
        values = load.take(where, dtype)
        if small:
            mean = (yield AllReduce(values)).div_(group.size)
        else:
            mean = yield from _averaged(values, self.wire, group)
        return load.mean_at(where, mean)

    def _chosen(
        self, load: Payload, k: int, sent_as: torch.dtype, group: Group
    ) -> Steps:
        """Indices that the leader of this step chose; at most k."""
        leader = count(load.state) % group.size
        dtype = index_dtype(len(load.flat))
        where = torch.empty(k, dtype=dtype, device=load.flat.device)
        if group.rank == leader:
            x = load.salience
            found = at_most(k, self.select(x, k, load.state), x)
            where[: len(found)] = found
            where[len(found) :] = found[-1]
            load.check(load.flat.index_select(0, found).to(sent_as))
        else:
            # What the leader will choose is not known yet.
            load.check_all(sent_as)
        return torch.unique_consecutive((yield Broadcast(where, leader)))


def pays(n: int, k: int, size: int, dtype: torch.dtype, wire: Wire = None) -> bool:
    """Whether indices and values of k entries are fewer bytes than n values."""
    width = wire_dtype(dtype, wire).itemsize
    twice = 2 * (size - 1) * width
    return size > 1 and 4 * k * size + twice * k < twice * n


def _averaged(values: Tensor, wire: Wire, group: Group) -> Flow:
    """The mean of `values` (1-D) over all ranks, in two halves with a cut."""
    n = len(values)
    even = values.new_zeros(-(-n // group.size) * group.size)
    even[:n] = values
    mean = yield from Dense(wire).reduce(Payload(even, [even]), group)
    return mean[:n]
