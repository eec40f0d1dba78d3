"""Times of requests over sizes, through the transport that training uses.

Knows requests and how long they took; the model that is fitted to them is `cost`.

[Note: One behind the other] After a pause a shaped link lets some bytes pass at once.
So requests of one size are made one behind the other, the first is not timed where
there is time for a second, and what counts is from one answer to the next: what a link
has saved up between two is what it was idle for.

[Note: One hop inside] Inside a host, gradtide's transport over Gloo sends parts to
everybody at once whatever their size, into memory that it keeps. Where such a link is
measured, its direct messages are timed so: an all-to-all answers in fresh pages, and
those take as long as the bytes do.

[Note: Far ranks] A message to a far rank is on its way for long after its bytes have
left, and training has other items on the link meanwhile. So requests whose bytes take
many times as long as that are all asked at once, and what counts is from one answer to
the next: their bytes, and no start. What is small is timed one by one, as it says what
a start takes. A ring is timed at sizes that travel in one. However little time there
is, the largest size takes as long as many ways of a message, and another of it goes
before: what takes hardly longer than a way tells nothing of the rate, and a connection
that was idle has yet to find it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median

from torch import Tensor

from gradtide.core import ops
from gradtide.core.ops import AllGather, AllToAll, Message, Op
from gradtide.planner.clock.cost import seconds
from gradtide.planner.measuring.bench import Bench
from gradtide.planner.measuring.fit import Point
from gradtide.planner.network import Link, Network
from gradtide.transport.gloo import HOP

LARGEST = 1 << 26  # bytes of one tensor: memory, and what a bucket may have
LONGEST = 0.1  # of the budget: a request of the largest size
GROWTH = 4.0  # from one size to the next while that is looked for
STEP = 3.0  # from one size to the next that is timed, at the least
LEAST = 1.5  # a second size is so much larger, whatever it takes
SIZES = 6  # at the most
MOST = 6  # timed requests of one size
FEW = 3  # where there is no time for more
WAYS = 10.0  # ways of a message, from which requests are asked at once
LONG = 1.5 * WAYS  # which the largest size takes among far ranks, at the least

Make = Callable[[Tensor, int], Op]  # of memory, and of the number of the request


@dataclass(frozen=True)
class Kind:
    """A request that is timed."""

    name: str
    field: str  # of a `Link`, that its times are for
    smallest: int  # bytes of its tensor
    make: Make
    weight: float = 1.0  # its share of the time
    needed: bool = False  # timed even if there is no time
    apart: bool = False  # waits until all ranks have their answer to the one before


def kinds(bench: Bench, like: Network) -> list[Kind]:
    """What is timed on such a network, in this order.

    Needed is one for each way of travelling; a ring is not among far ranks, where one
    that is long enough takes long.
    """
    rank, size = bench.group
    far = like.distance
    # beyond what goes in one hop
    ring = round(1.25 * max(HOP * size, far.most_direct(size)))
    tree = round(1.25 * HOP)
    pair = size - 1 - rank  # on another host, at least for rank 0

    def exchange(x: Tensor, _: int) -> Op:
        even = [len(x) // size] * size
        return AllToAll(x, even, even)

    def reduce(x: Tensor, _: int) -> Message:
        return ops.ReduceScatter(x)

    def gather(x: Tensor, _: int) -> Message:
        return AllGather(x.chunk(size)[rank], into=x)

    def broadcast(x: Tensor, number: int) -> Op:
        return ops.Broadcast(x, number % size)

    def within(make: Callable[[Tensor, int], Message]) -> Make:
        return lambda x, _: ops.Among(make(x, 0), range(size), inside=True)

    direct = [Kind("AllToAll", "direct", 1 << 12, exchange, 3.0, True)]
    # Those that share a host, see [Note: One hop inside].
    if like.intra is not None and bench.device.type == "cpu":
        direct = [
            Kind("Reduce in one hop", "direct", 1 << 12, within(reduce), 3.0, True),
            Kind("Gather in one hop", "direct", 1 << 12, within(gather), 2.0),
        ]
    return [
        Kind("ReduceScatter", "ring", ring, reduce, 3.0, not far.far),
        *direct,
        Kind("Swap", "swap", 1 << 12, lambda x, _: ops.Swap(x, pair), 1.0, True),
        Kind("AllGather", "ring", ring, gather, 2.0),
        # A root that sends on and on would hide the tree.
        Kind("Broadcast", "broadcast", tree, broadcast, 2.0, apart=True),
        # Not fitted: beside the ring that stands for it.
        Kind("AllReduce", "", ring, lambda x, _: ops.AllReduce(x)),
    ]


def shape(op: Op, bench: Bench, network: Network) -> tuple[float, float]:
    """How often `cost` charges alpha and beta for a request on such a network.

    Of its links, those count that are not free.
    """
    if ops.is_inside(op):
        network = replace(network, one_hop_bytes=LARGEST)
    starts, carried = (
        replace(network, inter=ones, intra=network.intra and ones)
        for ones in (Link.of(1.0, 0.0), Link.of(0.0, 1.0))
    )
    message = ops.message_of(op)
    return seconds(message, bench.group, starts), seconds(message, bench.group, carried)


def sweep(bench: Bench, kind: Kind, budget: float, network: Network) -> list[Point]:
    """Times of one kind over sizes, in about `budget` seconds.

    Half of the time is for the largest size, which says most of the rate. At least two
    sizes are timed, once, whatever they take.
    """
    far = network.distance.far
    longest = max(LONGEST * budget, LONG * network.delay if far else 0.0)
    largest, taken = _largest(bench, kind, longest, network)
    points: list[Point] = []
    most = FEW if SIZES * longest > budget else SIZES
    for size in _ladder(kind.smallest, largest, most):
        each = taken * size / largest
        count = max(1, min(MOST, int(budget / 2 / each) - 1))
        bench.tell(f"{kind.name} of {size / 1e6:.3g} MB, {count} x {each * 1e3:.0f} ms")
        together = far and each > WAYS * network.delay and not kind.apart
        ahead = together or budget > 3 * each
        points += _timed(bench, kind, size, count, ahead, network, together)
    return points


def _largest(
    bench: Bench, kind: Kind, longest: float, network: Network
) -> tuple[float, float]:
    """The size that takes about so long, and what it takes."""
    nbytes = float(kind.smallest)
    # Of two at once the second tells what bytes take, see [Note: Far ranks].
    far = network.distance.far and not kind.apart
    while True:
        bench.tell(f"{kind.name}, a first look at {nbytes / 1e6:.3g} MB")
        looked = _timed(bench, kind, nbytes, 1, far, network, far)
        taken = max(looked[0].seconds, 1e-6) + far * network.delay
        if taken > longest / GROWTH or nbytes * GROWTH > LARGEST:
            break
        nbytes *= GROWTH
    least = LEAST * kind.smallest
    larger = min(max(nbytes * min(longest / taken, GROWTH), least), float(LARGEST))
    return larger, taken * larger / nbytes


def _ladder(smallest: float, largest: float, most: int) -> list[float]:
    """Sizes from the smallest to the largest, at even ratios."""
    count, ratio = 2, largest / smallest
    while count < most and ratio ** (1 / count) >= STEP:
        count += 1
    return [smallest * ratio ** (i / (count - 1)) for i in range(count)]


def _timed(
    bench: Bench,
    kind: Kind,
    nbytes: float,
    count: int,
    ahead: bool,
    network: Network,
    together: bool = False,
) -> list[Point]:
    """So many requests: the medians over ranks.

    Of processors, whose parts differ, the means over ranks and requests. `ahead`: one
    more goes before, which is not timed. `together`: all are asked at once, and what
    counts is the mean, see [Note: Far ranks].
    """

    def make() -> list[Op]:
        x = bench.empty(nbytes)
        return [kind.make(x, i) for i in range(count + ahead)]

    asked = bench.prepared(make)
    found, end, worked = list[float](), bench.now(), 0.0
    answers = [bench.ask(op) for op in asked] if together else []
    for i, op in enumerate(asked):
        begin = end
        if kind.apart:
            bench.everyone(lambda: None)
            begin = bench.now()
        busy = time.process_time()
        answer = answers[i] if together else bench.ask(op)
        answer()
        end = bench.now()
        found.append(end - begin)
        worked += time.process_time() - busy
    timed = found[ahead:]
    if together:
        timed = [mean(timed)] * count
    own = partial(shape, asked[0], bench, network)
    everyone = bench.everyone(lambda: (timed, worked / len(asked), own()))
    # Of an odd number of ranks one has nobody to swap with.
    met = [f for f, _, (_, carried) in everyone if carried] or [timed]
    middle = [median(each) for each in zip(*met, strict=True)]
    processor = mean(worked for _, worked, _ in everyone)
    # Of a pair of swaps, or of a tree, each rank has its part; rank 0's is typical.
    starts, carried = everyone[0][-1]
    charged = 0.0 if together else starts, carried
    return [Point(kind.name, round(nbytes), *charged, s, processor) for s in middle]
