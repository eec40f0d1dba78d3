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

import torch
from torch import Tensor, nn
from torch.optim import SGD

from gradtide.ops import AllToAll, ReduceScatter, Swap
from gradtide.plan.bench import Bench
from gradtide.plan.fit import Point, fit
from gradtide.plan.network import Device, Line
from gradtide.select import SELECTORS, Selector

DENSITY = 0.01
SIZES = (1 << 14, 1 << 18, 1 << 21)  # elements
# Those that entries are of: more, as sorting many takes other ways than sorting few.
SELECTED = (1 << 18, 1 << 21, 1 << 23)
MEMORY = 1 << 24  # elements, 64 MB: see [Note: Cold]
ORDERED = 1 << 21  # entries, 8 MB: what is made of them is three times as large
WIDTH = 192  # of the matrices whose product is the computing that is slowed down
REQUESTS = 50
TURNS = 150  # of work and a request: how late ranks come varies by more than its mean
BETWEEN = 1 << 22  # elements copied between two requests: work as on a bucket
MOST = 1000  # requests in line
LEAST_BUSY = 0.5  # below that, the ranks waited for the link
Work = Callable[[], object]


def device(bench: Bench, budget: float) -> Device:
    """The lines of all the work that an exchange brings; about `budget` seconds."""
    each = budget / (len(SIZES) * (5 + len(SELECTORS)) + 1)
    entries = [round(DENSITY * n) for n in SELECTED]
    return Device(
        take_in=_line(bench, _copy, SIZES, each),
        select={
            selector.__name__: _line(bench, _select(selector()), SIZES, each)
            for selector in SELECTORS
        },
        scatter=_line(bench, _scatter, entries, each),
        nearby=_line(bench, _gather, entries, each),
        sort=_line(bench, _order, [bench.group.size * n for n in entries], each),
        optimizer=_line(bench, _step, SIZES, each),
        request=_request(bench),
    )


def interference(bench: Bench, nbytes: float, budget: float) -> float:
    """The factor by which computing slows down while the lane is busy.

    Computes for half of the budget (seconds) alone, and for half of it while tensors of
    `nbytes` are reduced: as many as fit in by the time that one has taken all ranks.
    """
    bench.tell("computing, alone and beside requests")
    a = bench.prepared(lambda: torch.rand(WIDTH, WIDTH, device=bench.device))
    alone = _mean(bench, lambda: a @ a, budget / 2)
    op = bench.prepared(lambda: ReduceScatter(bench.empty(nbytes)))
    begin = bench.now()
    bench.ask(op)()
    spent = bench.now() - begin
    exchange = bench.middle(lambda: [spent])[0]
    joins = [
        bench.ask(op) for _ in range(max(1, min(MOST, round(budget / 2 / exchange))))
    ]

    def beside() -> list[float]:
        try:
            return [_spent(bench, lambda: a @ a, budget / 2)]
        finally:
            for join in joins:
                join()

    return max(1.0, bench.middle(beside)[0] / alone)


def sharing(bench: Bench, budget: float) -> float:
    """The factor, 1 to 2, by which the lane's work and the training thread's slow down.

    When both compute, and all ranks at once: 2 where a rank has one core or less.
    """
    if bench.device.type != "cpu":
        return 1.0  # what a kernel leaves of a device to another is not told from here
    bench.tell("computing, by one thread and by two")
    a = bench.prepared(lambda: torch.rand(WIDTH, WIDTH))
    alone = _mean(bench, lambda: a @ a, budget / 2)

    def beside() -> list[float]:
        ticket = bench.transport.submit(
            lambda: None, lambda: _compute(bench, a, budget / 2)
        )
        try:
            return [_spent(bench, lambda: a @ a, budget / 2)]
        finally:
            ticket.join()

    return min(max(bench.middle(beside)[0] / alone, 1.0), 2.0)


def turns(bench: Bench, processors: float) -> tuple[float, float]:
    """Work and requests in turn, when ranks have so many processors for themselves.

    By which share of the work a request is answered later when all ranks come from it;
    and for which share of the time they keep the processors busy, if they have too few.
    """
    bench.tell("requests, after work and one behind the other")
    size = bench.group.size
    op = bench.prepared(lambda: AllToAll(bench.empty(4 * size), [1] * size, [1] * size))
    work = bench.prepared(lambda: _copy(bench, BETWEEN))

    def mean(*steps: Work) -> float:
        begin = bench.now()
        for _ in range(TURNS):
            for step in steps:
                step()
        spent = (bench.now() - begin) / TURNS
        return bench.middle(lambda: [spent])[0]

    def request() -> None:
        bench.ask(op)()

    asking, working = mean(request), mean(work)
    begin = time.process_time()
    together = mean(work, request)
    worked = (time.process_time() - begin) / TURNS
    worked = bench.middle(lambda: [worked])[0]
    busy = min(worked / together / processors, 1.0) if processors < 1 else 1.0
    spread = (together - asking - working) / working
    return min(max(spread, 0.0), 1.0), max(busy, LEAST_BUSY)


def _compute(bench: Bench, a: Tensor, seconds: float) -> None:
    _spent(bench, lambda: a @ a, seconds)


def _line(
    bench: Bench,
    make: Callable[[Bench, int], Work],
    sizes: Sequence[int],
    seconds: float,
) -> Line:
    """A line through the mean times of work on so many elements."""
    bench.tell(f"{make.__name__.strip('_')}, on all ranks at once")
    points = []
    for n in sizes:
        work = bench.prepared(partial(make, bench, n))
        taken = _mean(bench, work, seconds)
        points.append(Point(make.__name__, n, 1.0, n, taken))
    found = bench.first(lambda: fit(points))
    return Line(found.alpha, found.beta)


def _mean(bench: Bench, work: Work, seconds: float) -> float:
    """Seconds of a call while all ranks make such calls; the median over ranks."""
    bench.prepared(work)  # the first call is not timed
    return bench.middle(lambda: [_spent(bench, work, seconds)])[0]


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
    values, gradients = _zeros(bench), _zeros(bench)
    optimizers = []
    for value, gradient in zip(
        torch.split(values, n), torch.split(gradients, n), strict=True
    ):
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
    flats = _cold(flat, n * apart)
    where = torch.arange(n, device=bench.device) * apart
    values = torch.ones(n, device=bench.device)
    uses: list[Callable[[Tensor], object]] = [
        lambda flat: flat.index_select(0, where),
        lambda flat: flat.index_add_(0, where, values),
        lambda flat: flat.index_fill_(0, where, 0.0),
    ]
    turns = ((use, flat) for flat in flats for use in uses)

    def work() -> None:
        use, flat = next(turns)
        use(flat)

    return work


def _order(bench: Bench, n: int) -> Work:
    """Entries brought in order, as those of all ranks are: each sent its own sorted."""
    size = bench.group.size
    own, most = n // size, round(n / size / DENSITY)
    rows = (max(ORDERED // n, 1) * size, own)
    where = torch.randint(most, rows, dtype=torch.int32, device=bench.device)
    arrivals = _cold(where.sort().values.flatten(), size * own)
    return lambda: torch.unique(next(arrivals), return_inverse=True)


def _select(selector: Selector) -> Callable[[Bench, int], Work]:
    def select(bench: Bench, n: int) -> Work:
        flats = _cold(torch.randn(MEMORY, device=bench.device), n)
        state: dict[str, Tensor] = {}
        return lambda: selector(next(flats), max(1, round(DENSITY * n)), state)

    return select


def _request(bench: Bench) -> float:
    """Seconds of a request that does not travel.

    As many on every rank: messages are known by the number of their request.
    """
    own = bench.group.rank
    op = bench.prepared(lambda: Swap(torch.zeros(1, device=bench.device), own))
    begin = bench.now()
    for _ in range(REQUESTS):
        bench.ask(op)()
    spent = (bench.now() - begin) / REQUESTS
    return bench.middle(lambda: [spent])[0]
