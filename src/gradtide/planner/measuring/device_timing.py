"""What an exchange costs a rank's own processor, with all ranks at work at once.

[Note: Means] Ranks that share cores are stopped for a while now and then. The median of
short calls would not see that; so calls are made for a fixed time, on all ranks at
once, and their mean counts. What they call is made before, on all ranks.

[Note: Cold] In training a bucket has left the caches by the time its turn comes round
again: a selection from warm memory takes a third. So calls go through MEMORY in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from gradtide.core.ops import AllToAll, ReduceScatter, Swap
from gradtide.core.transport import Job
from gradtide.planner.measuring.bench import Bench
from gradtide.planner.measuring.fit import Point, fit
from gradtide.planner.network import Device, Line
from gradtide.selectors import SELECTORS, Selector

DENSITY = 0.01
SIZES = (1 << 14, 1 << 18, 1 << 21)  # elements
# Those that entries are of: more, as sorting many takes other ways than sorting few.
SELECTED = (1 << 18, 1 << 21, 1 << 23)
MEMORY = 1 << 24  # elements, 64 MB: see [Note: Cold]
ORDERED = 1 << 21  # entries, 8 MB: what is made of them is three times as large
WIDTH = 192  # of the matrices whose product is the computing that is slowed down
REQUESTS = 50
TURNS = 150  # of work and a request: how late ranks come varies by more than its mean
FEWEST = 30  # turns among far ranks, of which
WAITED = 2.0  # seconds are the ways of messages, unless that makes fewer
BETWEEN = 1 << 22  # elements copied between two requests: work as on a bucket
MOST = 1000  # requests in line
LEAST_BUSY = 0.5  # below that, the ranks waited for the link
Work = Callable[[], object]
Join = Callable[[], None]
Make = Callable[[Bench, int], Work]  # of work on so many elements


def device(bench: Bench, budget: float) -> Device:
    """The lines of all the work that an exchange brings; about `budget` seconds."""
    each = budget / (len(SIZES) * (5 + len(SELECTORS)) + 1)
    entries = [round(DENSITY * n) for n in SELECTED]
    own = bench.group.rank  # to whom a request does not travel
    nothing = bench.prepared(lambda: Swap(torch.zeros(1, device=bench.device), own))
    timed = {
        "take_in": _points(bench, _copy, SIZES, each),
        "scatter": _points(bench, _scatter, entries, each),
        "nearby": _points(bench, _gather, entries, each),
        "sort": _points(bench, _order, [bench.group.size * n for n in entries], each),
        "optimizer": _points(bench, _step, SIZES, each),
    }
    for made in SELECTORS:
        timed[made.__name__] = _points(bench, _select(made()), SIZES, each)
    lines: dict[str, Any] = bench.first(
        lambda: {name: _line(own) for name, own in timed.items()}
    )
    return Device(
        select={made.__name__: lines.pop(made.__name__) for made in SELECTORS},
        **lines,
        request=bench.taken(REQUESTS, lambda: bench.ask(nothing)()),
        beside=bench.device.type == "cpu",
    )


def interference(bench: Bench, nbytes: float, budget: float) -> float:
    """The factor by which computing slows down while the queue is busy.

    Computes for half of the budget (seconds) alone, and for half of it while tensors of
    `nbytes` are reduced: as many as fit in by the time that one has taken all ranks.
    """
    bench.tell("computing, alone and beside requests")
    half = budget / 2

    def requests(_: Work) -> list[Join]:
        op = bench.prepared(lambda: ReduceScatter(bench.empty(nbytes)))
        exchange = bench.taken(1, lambda: bench.ask(op)())
        count = max(1, min(MOST, round(half / exchange)))
        return [bench.ask(op) for _ in range(count)]

    return max(1.0, _slowed(bench, half, requests))


def sharing(bench: Bench, budget: float) -> float:
    """By which factor (1 to 2) the queue's work and the training thread's slow down.

    When both compute, and all ranks at once: 2 where a rank has one core or less.
    """
    if bench.device.type != "cpu":
        return 1.0  # what a kernel leaves of a device to another is not told from here
    bench.tell("computing, by one thread and by two")
    half = budget / 2

    def another(compute: Work) -> list[Join]:
        def work() -> None:
            _spent(bench, compute, half)

        return [bench.transport.submit(Job(lambda: None, work)).join]

    return min(max(_slowed(bench, half, another), 1.0), 2.0)


def turns(bench: Bench, processors: float, delay: float) -> tuple[float, float]:
    """Work and requests in turn, when ranks have so many processors for themselves.

    By which share of the work a request is answered later when all ranks come from it;
    and for which share of the time they keep the processors busy, if they have too few:
    of the time in which no answer is on its way, `delay` seconds for each.
    """
    bench.tell("requests, after work and one behind the other")
    size = bench.group.size
    op = bench.prepared(lambda: AllToAll(bench.empty(4 * size), [1] * size, [1] * size))
    work = bench.prepared(lambda: _copy(bench, BETWEEN))

    def request() -> None:
        bench.ask(op)()

    times = min(TURNS, max(FEWEST, int(WAITED / max(delay, 1e-9))))
    asking, working = bench.taken(times, request), bench.taken(times, work)
    begin = time.process_time()
    together = bench.taken(times, work, request)
    worked = (time.process_time() - begin) / times
    worked = bench.middle(lambda: worked)
    busy, here = 1.0, together - delay
    if processors < 1 and here > 0:
        busy = min(worked / here / processors, 1.0)
    spread = (together - asking - working) / working
    return min(max(spread, 0.0), 1.0), max(busy, LEAST_BUSY)


def _slowed(bench: Bench, seconds: float, start: Callable[[Work], list[Join]]) -> float:
    """How many times as long computing takes beside what is started with it."""
    a = bench.prepared(lambda: torch.rand(WIDTH, WIDTH, device=bench.device))
    compute = partial(torch.matmul, a, a)
    bench.prepared(compute)  # the first call is not timed
    alone = bench.middle(lambda: _spent(bench, compute, seconds))
    joins = start(compute)

    def beside() -> float:
        try:
            return _spent(bench, compute, seconds)
        finally:
            for join in joins:
                join()

    return bench.middle(beside) / alone


def _points(
    bench: Bench, make: Make, sizes: Sequence[int], seconds: float
) -> list[Point]:
    """Mean times of work on so many elements, the medians over ranks.

    Ranks do not meet in between: among far ones that would take longer than the work.
    """
    bench.tell(f"{make.__name__.strip('_')}, on all ranks at once")
    own = bench.everyone(lambda: [_mean(bench, make(bench, n), seconds) for n in sizes])
    return [
        Point(make.__name__, n, 1.0, n, median(taken))
        for n, taken in zip(sizes, zip(*own, strict=True), strict=True)
    ]


def _line(points: Sequence[Point]) -> Line:
    found = fit(points)
    return Line(found.alpha, found.beta)


def _mean(bench: Bench, work: Work, seconds: float) -> float:
    """Seconds of a call; the first one is not timed."""
    work()
    return _spent(bench, work, seconds)


def _spent(bench: Bench, work: Work, seconds: float) -> float:
    begin, calls = bench.now(), 0
    while True:
        work()
        calls += 1
        passed = bench.now() - begin
        if passed >= seconds:
            return passed / calls


def _cold(flat: Tensor, n: int) -> Iterator[Tensor]:
    """Stretches of n elements, again and again: see [Note: Cold]."""
    return cycle(list(torch.split(flat, n)[: max(len(flat) // n, 1)]))


def _zeros(bench: Bench) -> Tensor:
    return torch.zeros(MEMORY, device=bench.device)


def _copy(bench: Bench, n: int) -> Work:
    buckets = _cold(_zeros(bench), n)
    gradient = torch.zeros(n, device=bench.device)  # it has just been computed
    return lambda: next(buckets).copy_(gradient)


def _step(bench: Bench, n: int) -> Work:
    values, gradients = (torch.split(_zeros(bench), n) for _ in range(2))
    optimizers = []
    for value, gradient in zip(values, gradients, strict=True):
        p = nn.Parameter(value)
        p.grad = gradient
        optimizers.append(SGD([p], lr=0.1, foreach=True))
    turns = cycle(optimizers)
    return lambda: next(turns).step()


def _scatter(bench: Bench, n: int) -> Work:
    """The entries of a selection: looked up, added to and cleared in turn.

    An exchange touches most of its entries more than once, and finds them cold once.
    """
    return _uses(bench, n, round(1 / DENSITY), _zeros(bench))


def _gather(bench: Bench, n: int) -> Work:
    """Entries that are close to each other, of a tensor that has just been made."""
    return _uses(bench, n, 2, torch.zeros(2 * n, device=bench.device))


def _uses(bench: Bench, n: int, apart: int, flat: Tensor) -> Work:
    where = torch.arange(n, device=bench.device) * apart
    values = torch.ones(n, device=bench.device)

    def uses() -> Iterator[object]:
        for stretch in _cold(flat, n * apart):
            yield stretch.index_select(0, where)
            yield stretch.index_add_(0, where, values)
            yield stretch.index_fill_(0, where, 0.0)

    turns = uses()
    return lambda: next(turns)


def _order(bench: Bench, n: int) -> Work:
    """Entries brought in order, as those of all ranks are: each sent its own sorted."""
    size = bench.group.size
    own, most = n // size, round(n / size / DENSITY)
    rows = (max(ORDERED // n, 1) * size, own)
    where = torch.randint(most, rows, dtype=torch.int32, device=bench.device)
    arrivals = _cold(where.sort().values.flatten(), size * own)
    return lambda: torch.unique(next(arrivals), return_inverse=True)


def _select(selector: Selector) -> Make:
    def select(bench: Bench, n: int) -> Work:
        flats = _cold(torch.randn(MEMORY, device=bench.device), n)
        state: dict[str, Tensor] = {}
        return lambda: selector(next(flats), max(1, round(DENSITY * n)), state)

    return select
