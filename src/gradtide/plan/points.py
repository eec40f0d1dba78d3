"""Times of requests over sizes, through the transport that training uses.

Knows requests and how long they took; the model that is fitted to them is `cost`.

[Note: One behind the other] After a pause a shaped link lets some bytes pass at once.
So requests of one size are made one behind the other, the first is not timed where
there is time for a second, and what counts is from one answer to the next: what a link
has saved up between two is what it was idle for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

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
from gradtide.plan.bench import Bench
from gradtide.plan.cost import seconds
from gradtide.plan.fit import Point
from gradtide.plan.network import ONE_HOP_BYTES, Link, Network

LARGEST = 1 << 26  # bytes of one tensor: memory, and what a bucket may have
LONGEST = 0.1  # of the budget: a request of the largest size
GROWTH = 4.0  # from one size to the next while that is looked for
STEP = 3.0  # from one size to the next that is timed, at the least
LEAST = 1.5  # a second size is so much larger, whatever it takes
SIZES = 6  # at the most
MOST = 6  # timed requests of one size

Make = Callable[[Tensor, int], Op]  # of memory, and of the number of the request


@dataclass(frozen=True)
class Kind:
    """A request that is timed, and the field of a `Link` that its times are for.

    `weight`: its share of the time. Without `needed`, it is timed if there is time.
    `apart`: each request waits until all ranks have their answer to the one before.
    """

    name: str
    field: str
    smallest: int  # bytes of its tensor
    make: Make
    weight: float = 1.0
    needed: bool = False
    apart: bool = False


def kinds(bench: Bench) -> list[Kind]:
    """What is timed, in this order; needed is one for each way of travelling."""
    rank, size = bench.group
    ring = round(1.25 * ONE_HOP_BYTES * size)  # beyond what goes in one hop
    pair = size - 1 - rank  # on another host, at least for rank 0

    def exchange(x: Tensor, _: int) -> Op:
        even = [len(x) // size] * size
        return AllToAll(x, even, even)

    def gather(x: Tensor, _: int) -> Op:
        part = len(x) // size
        return AllGather(x[rank * part : (rank + 1) * part], into=x)

    def scatter(x: Tensor, _: int) -> Op:
        return ReduceScatter(x)

    def swap(x: Tensor, _: int) -> Op:
        return Swap(x, pair)

    def broadcast(x: Tensor, number: int) -> Op:
        return Broadcast(x, number % size)

    def reduce(x: Tensor, _: int) -> Op:
        return AllReduce(x)

    return [
        Kind("ReduceScatter", "ring", ring, scatter, 3.0, needed=True),
        Kind("AllToAll", "direct", 1 << 12, exchange, 3.0, needed=True),
        Kind("Swap", "swap", 1 << 12, swap, needed=True),
        Kind("AllGather", "ring", ring, gather, 2.0),
        # A root that sends on and on would hide the tree.
        Kind("Broadcast", "broadcast", 1 << 12, broadcast, 2.0, apart=True),
        # Gloo's own, not fitted: beside the ring that stands for it.
        Kind("AllReduce", "", ring, reduce),
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
    """Times of one kind over sizes, in about `budget` seconds.

    Half of the time is for the largest size, which says most of the rate. At least two
    sizes are timed, once, whatever they take.
    """
    largest, taken = _largest(bench, kind, LONGEST * budget)
    charged = bench.prepared(lambda: shape(network))
    points: list[Point] = []
    for size in _ladder(kind.smallest, largest):
        each = taken * size / largest
        count = max(1, min(MOST, int(budget / 2 / each) - 1))
        bench.tell(f"{kind.name} of {size / 1e6:.3g} MB, {count} x {each * 1e3:.0f} ms")
        found, op = _timed(bench, kind, size, count, budget > 3 * each)
        # Of a pair of swaps, or of a tree, each rank has its part; rank 0's is typical.
        starts, carried = bench.first(partial(charged, op, bench))
        nbytes = round(size)
        points += [Point(kind.name, nbytes, starts, carried, *took) for took in found]
    return points


def _largest(bench: Bench, kind: Kind, longest: float) -> tuple[float, float]:
    """The size that takes about so long, and what it takes."""
    nbytes = float(kind.smallest)
    while True:
        bench.tell(f"{kind.name}, a first look at {nbytes / 1e6:.3g} MB")
        taken = max(_timed(bench, kind, nbytes, 1, False)[0][0][0], 1e-6)
        if taken > longest / GROWTH or nbytes * GROWTH > LARGEST:
            break
        nbytes *= GROWTH
    least = LEAST * kind.smallest
    larger = min(max(nbytes * min(longest / taken, GROWTH), least), float(LARGEST))
    return larger, taken * larger / nbytes


def _ladder(smallest: float, largest: float) -> list[float]:
    """Sizes from the smallest to the largest, at even ratios."""
    count, ratio = 2, largest / smallest
    while count < SIZES and ratio ** (1 / count) >= STEP:
        count += 1
    return [smallest * ratio ** (i / (count - 1)) for i in range(count)]


def _timed(
    bench: Bench, kind: Kind, nbytes: float, count: int, ahead: bool
) -> tuple[list[tuple[float, float]], Op]:
    """Seconds of so many requests, and of a rank's processor; and one of them.

    The medians over ranks; of processors, whose parts differ, the means over ranks and
    requests. `ahead`: one more goes before, which is not timed.
    """

    def make() -> list[Op]:
        x = bench.empty(nbytes)
        return [kind.make(x, i) for i in range(count + ahead)]

    ops = bench.prepared(make)
    found, end, worked = list[float](), bench.now(), 0.0
    for op in ops:
        begin = end
        if kind.apart:
            bench.everyone(lambda: None)
            begin = bench.now()
        busy = time.process_time()
        bench.ask(op)()
        end = bench.now()
        found.append(end - begin)
        worked += time.process_time() - busy
    everyone = bench.everyone(lambda: (found[ahead:], worked / len(ops)))
    middle = [median(each) for each in zip(*(f for f, _ in everyone), strict=True)]
    processor = bench.first(lambda: mean(worked for _, worked in everyone))
    return [(each, processor) for each in middle], ops[0]
