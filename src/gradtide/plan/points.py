"""Times of requests over sizes, through the transport that training uses.

Knows requests and clocks; the model that the times are fitted to is `cost`.

[Note: One behind the other] After a pause a shaped link lets some bytes pass at once.
So requests of one size are made one behind the other, the first is not timed where
there is time for a second, and what counts is from one answer to the next.

[Note: Agreement] All ranks decide alike how often and how large to ask, because they
decide by the times that all have gathered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradtide.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Op,
    ReduceScatter,
    Swap,
)
from gradtide.plan.cost import seconds
from gradtide.plan.fit import Point
from gradtide.plan.network import ONE_HOP_BYTES, Link, Network
from gradtide.transport import Transport

ITEM = 4  # bytes: float32
LARGEST = 1 << 26  # bytes of one tensor: memory, and what a bucket may have
GROWTH = 3.0  # from one size to the next
MOST = 6  # timed requests of one size
FEW = 2  # sizes that a line needs

Make = Callable[[Tensor, int], Op]  # of memory, and of the number of the request


@dataclass(frozen=True)
class Kind:
    """A request that is timed, and the field of a `Link` that its times are for."""

    name: str
    field: str
    smallest: int  # bytes of its tensor
    make: Make


class Bench:
    """Makes requests on a transport, whose ranks all do the same at the same time."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device
        self.group = transport.group

    def now(self) -> float:
        """The time, when all that was asked of the device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def ask(self, op: Op) -> Callable[[], None]:
        """Put a request in line; what is returned waits for the answer."""
        pending: list[Any] = []
        return self.transport.submit(
            lambda: pending.append(self.transport.issue(op)),
            lambda: self.transport.wait(pending.pop()),
        ).join

    def meet(self) -> None:
        """Return when all ranks have come here."""
        self.ask(AllReduce(torch.zeros(1, device=self.device)))()
        self.now()

    def empty(self, nbytes: float) -> Tensor:
        """Zeros, in a number that all ranks can divide among them."""
        size = self.group.size
        numel = max(1, round(nbytes / ITEM / size)) * size
        return torch.zeros(numel, device=self.device)

    def middle(self, values: list[float]) -> list[float]:
        """The median over ranks of each value, the same everywhere."""
        everyone = self.transport.gather_objects(values)
        return [median(each) for each in zip(*everyone, strict=True)]


def kinds(bench: Bench, hurried: bool) -> list[Kind]:
    """What is timed; `hurried`, one request for each way of travelling but trees."""
    rank, size = bench.group
    ring = round(1.25 * ONE_HOP_BYTES * size)  # beyond what goes in one hop
    pair = size - 1 - rank  # on another host, at least for rank 0

    def exchange(x: Tensor, _: int) -> Op:
        even = [len(x) // size] * size
        return AllToAll(x, even, even)

    def gather(x: Tensor, _: int) -> Op:
        part = len(x) // size
        return AllGather(x[rank * part : (rank + 1) * part], into=x)

    few = [
        Kind("AllToAll", "direct", 1 << 12, exchange),
        Kind("ReduceScatter", "ring", ring, lambda x, _: ReduceScatter(x)),
        Kind("Swap", "swap", 1 << 12, lambda x, _: Swap(x, pair)),
    ]
    if hurried:
        return few
    return [
        *few,
        Kind("AllGather", "ring", ring, gather),
        # From everybody in turn: a root that sends on and on would hide the tree.
        Kind("Broadcast", "broadcast", 1 << 12, lambda x, i: Broadcast(x, i % size)),
        # Gloo's own, not fitted: beside the ring that stands for it.
        Kind("AllReduce", "", ring, lambda x, _: AllReduce(x)),
    ]


def shape(network: Network) -> Callable[[Op, Bench], tuple[float, float]]:
    """How often `cost` charges alpha and beta for a request on such a network.

    Of its links, those count that are not free.
    """

    def unit(alpha: float, beta: float) -> Network:
        ones = Link.of(alpha, beta)
        free = network.intra is None
        return Network(
            network.hosts,
            network.ranks_per_host,
            inter=ones,
            intra=None if free else ones,
        )

    starts, carried = unit(1.0, 0.0), unit(0.0, 1.0)
    return lambda op, bench: (
        seconds(op, bench.group, starts),
        seconds(op, bench.group, carried),
    )


def sweep(bench: Bench, kind: Kind, budget: float, network: Network) -> list[Point]:
    """Times of one kind over growing sizes, for about `budget` seconds.

    At least two sizes are timed, whatever they take.
    """
    charged, points = shape(network), list[Point]()
    nbytes, spent, sizes = float(kind.smallest), 0.0, 0
    while True:
        x = bench.empty(nbytes)
        found = _in_a_row(bench, kind, x, budget / 4)
        spent += sum(found)
        # Of a pair of swaps, or of a tree, each rank has its part; rank 0's is typical.
        starts, carried = charged(kind.make(x, 0), bench)
        points += [
            Point(kind.name, len(x) * ITEM, starts, carried, taken)
            for taken in found[1:] or found
        ]
        sizes += 1
        typical = median(found[1:] or found)
        enough = sizes >= FEW and spent + 2 * GROWTH * typical > budget
        nbytes *= GROWTH if spent + 2 * GROWTH * typical < budget else 1.5
        if enough or nbytes > LARGEST:
            return points


def _in_a_row(bench: Bench, kind: Kind, x: Tensor, budget: float) -> list[float]:
    """Seconds from answer to answer; as many as fit in the budget, at least one."""
    bench.meet()
    first = bench.middle([_timed(bench, kind, x, 0, 1)[0]])
    more = min(MOST, int(budget / max(first[0], 1e-6)))
    if not more:
        return first
    bench.meet()
    found = _timed(bench, kind, x, 1, more + 1)
    return bench.middle(found)


def _timed(bench: Bench, kind: Kind, x: Tensor, first: int, count: int) -> list[float]:
    moments = [bench.now()]
    for i in range(first, first + count):
        bench.ask(kind.make(x, i))()
        moments.append(bench.now())
    return [b - a for a, b in pairwise(moments)]
