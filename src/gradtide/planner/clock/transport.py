"""A transport on a virtual clock: what requests ask for takes time, and nothing else.

[Note: One queue, two clocks] The training thread and the queue have a time each. What
is submitted runs at once in the real order, but on the queue's time: from when the item
before it has ended, or earlier. As on the real queue, an item begins (it selects, and
posts its first request) as soon as all that is left of the one before is waiting.
Nothing ever looks at the time of the other thread, as nothing does in training: the
order is a function of the program (guard: tests/planner/test_virtual.py).

[Note: Moments to begin early] The real queue looks for the next item once all that a
request sends has left: rings and direct messages near their end, swaps at any time, and
Gloo's broadcast only when it starts.

[Note: Far links] Where hosts are far apart a message is on its way for long after its
last byte has left, and meanwhile the wire is free for what others send. There an item
begins as soon as the one before it waits, if no more than a few are under way, and goes
on as soon as its answer is here: of all that may leave, and of all that the thread has
to do, what is the earliest item's comes first, and others have what that leaves.

[Note: Lanes] What items do inside hosts before and after runs on a time of its own
each, in the order of submission, as in the lanes of the real queue. It shares its link
with nothing that is between hosts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gradtide.core import ops
from gradtide.core.ops import Cut, Group, Handover, Message, Op, ToHost
from gradtide.core.transport import Job, Progress
from gradtide.planner.clock import cost
from gradtide.planner.clock.intervals import Interval, gap, held_up, stretched, union
from gradtide.planner.clock.symbolic_requests import shaped
from gradtide.planner.network import Network
from gradtide.transport.links import FAR_TRACKS
from gradtide.transport.ring import carried

MOST = 1 << 62  # bytes: any number


@dataclass
class Window:
    """A wait of an item: from when the next may begin, and when the answer is here.

    `last` is the latest moment at which the queue looks for the next item.
    """

    opens: float
    last: float
    ends: float


@dataclass
class WorkItem:
    """What was submitted: when its work ends, and when all of it does."""

    transport: VirtualTransport
    worked: float = 0.0
    ends: float = 0.0

    def put_off(self, worked: float) -> None:
        """Its work ends later than it seemed to."""
        late = max(worked - self.worked, 0.0)
        self.worked += late
        self.ends += late

    def join(self) -> None:
        self.transport.now = max(self.transport.now, self.ends)

    def done(self) -> bool:
        return self.transport.now >= self.ends


class Circle(NamedTuple):
    """Those that a request is asked of, and what it takes among them."""

    group: Group
    network: Network
    charges: Network  # what it takes of a processor
    weightless: Network | None  # the same if bytes took no time; None: it is not far

    @staticmethod
    def of(rank: int, network: Network) -> Circle:
        group, weightless = Group(rank, network.size), None
        if network.distance.far:
            weightless = replace(network, inter=network.inter.stretched(0.0))
        return Circle(group, network, network.charged(), weightless)


@dataclass
class Pending:
    """A request on its way; None: it starts when it is waited for."""

    op: Message | ToHost | Cut | Handover
    circle: Circle
    ends: float | None


class VirtualTransport:
    """Answers requests after the time that they take on `network`.

    Answers have the right shape and no meaning (`shaped`), so flows must not
    look at them: those on tensors without memory cannot, and `rehearsal` makes such
    flows of all collectives.
    """

    def __init__(self, network: Network, rank: int = 0) -> None:
        self.network = network
        self.group = Group(rank, network.size)
        self.hosts = network.members
        self.progress, self.delay = Progress(), network.delay
        self.payload_bytes = 0
        self.processor = 0.0  # seconds of the rank's, for exchanges
        self.overhead = 1.0  # times what is counted, that the queue works for longer
        local = network.ranks_per_host
        self._all = Circle.of(rank, network)
        inside = replace(network, hosts=1, one_hop_bytes=MOST)  # see `transport.gloo`
        # What all ranks of a host send at once goes through its one card.
        shared = network.inter.stretched(local)
        across = replace(network, ranks_per_host=1, inter=shared)
        self._inside = Circle.of(rank % local, inside)
        self._across = Circle.of(rank // local, across)
        self.now = 0.0  # the training thread's time
        self._until = 0.0  # then it goes on to something else than computing
        self._at: float | None = None  # the queue's time, while it is the queue's turn
        self._wire = 0.0  # busy until then
        self._far = network.distance.far
        # When far wires and the queue's thread are busy, see [Note: Far links].
        self._leaving: list[Interval] = []
        self._own: list[Interval] = []
        self._under_way: deque[WorkItem] = deque(maxlen=FAR_TRACKS)
        self._next = 0.0  # then another item may begin, where hosts are far
        self._inner: list[Interval] = []  # when those inside hosts are; recent ones
        self._lanes = {"before": 0.0, "after": 0.0}  # busy until then
        self._last = WorkItem(self)
        self._windows: list[Window] = []
        self.busy: list[Interval] = []  # when the queue had an item
        self.inside: list[Interval] = []  # when its other lanes had one; recent ones
        self.beside: list[Interval] = []  # when a third thread works; recent ones
        self._worked: list[Interval] = []  # when its processor worked; recent ones
        self._worked_for = 0.0  # seconds since the last request

    # - What a transport does ----------------------------------------------------------

    def submit(self, job: Job) -> WorkItem:
        ready = self.now
        if job.before is not None:
            ready = self._beside("before", job.before, ready)
        if job.settled:
            ready = max(ready, self._lanes["after"])
        item = (self._work_among if self._far else self._work)(job, ready)
        if job.after is not None:
            item.ends = self._beside("after", job.after, item.worked)
        return item

    def _beside(self, lane: str, work: Callable[[], None], start: float) -> float:
        """What is done inside hosts, see [Note: Lanes]; when it ends."""
        windows, worked = self._windows, self._worked_for
        self._windows, self._worked_for = [], 0.0
        self._at = start = max(start, self._lanes[lane])
        work()
        self._lanes[lane] = ends = self._at
        self._windows, self._worked_for, self._at = windows, worked, None
        self.inside.append((start, ends))
        return ends

    def _work(self, job: Job, now: float) -> WorkItem:
        """An item's turn in the main lane, from when it is ready."""
        before = self._last
        windows = self._windows if now < before.worked else []
        window = next((w for w in windows if w.last >= now), None)
        if window is not None:
            start, _ = self.busy.pop()
            self._at = max(now, window.opens)
            wire, self._wire = self._wire, window.ends
            # What the item before works at its end comes after this.
            worked, self._worked_for = self._worked_for, 0.0
            job.begin()
            self._worked_for += worked
            self._yield_to(window, before, wire)
        else:
            self._at = start = max(now, before.worked)
            job.begin()
        self._at = max(self._at, before.worked)
        self._windows = []
        job.work()
        self._last = WorkItem(self, self._at, self._at)
        self.busy.append((start, self._at))
        self._at = None
        return self._last

    def _work_among(self, job: Job, now: float) -> WorkItem:
        """The same where hosts are far, among other items: see [Note: Far links]."""
        first = self._under_way[0] if len(self._under_way) == FAR_TRACKS else None
        start = max(now, self._next, 0.0 if first is None else first.worked)
        self._at, self._windows = start, []
        job.begin()
        job.work()
        item, self._at = WorkItem(self, self._at, self._at), None
        self._under_way.append(item)
        self._next = self._windows[0].opens if self._windows else item.worked
        recent = [i for i in self.busy[-FAR_TRACKS:] if i[1] >= start]
        del self.busy[len(self.busy) - len(recent) :]
        self.busy += union([*recent, (start, item.worked)])
        return item

    def _yield_to(self, window: Window, before: WorkItem, wire: float) -> None:
        """The item that was waiting goes on later for the one that has begun."""
        assert self._at is not None
        if window is self._windows[-1]:
            before.put_off(self._at)
            self._wire = max(wire, self._wire)
        else:
            late = max(self._at, self._wire) - window.ends
            before.put_off(before.worked + late)
            self._wire = wire + late

    def sends(self, op: Op) -> int:
        """Bytes of payload a rank sends; of a broadcast, the average."""
        message, size = ops.message_of(op), self._circle(op).group.size
        crossing = ops.crossing(op, self.group)
        if isinstance(message, ops.Broadcast):
            return crossing * (size - 1) * message.tensor.nbytes // size
        if isinstance(message, ops.AllReduce) and self._is_small(message, size):
            return crossing * (size - 1) * message.tensor.nbytes
        return ops.payload_bytes(op, self.group)

    def issue(self, op: Op) -> Pending:
        self.payload_bytes += self.sends(op)
        message, circle = ops.message_of(op), self._circle(op)
        if isinstance(message, ops.ToHost) or circle.group.size == 1:
            return Pending(message, circle, self.clock())
        # Posting it is part of what the request was measured to cost.
        self._keep_busy(self.overhead * self.network.device.request)
        posted = cost.seconds(message, circle.group, circle.charges)
        self.processor += self.overhead * posted
        pending = Pending(message, circle, None)
        # A long broadcast is Gloo's, and starts when it is waited for.
        if not isinstance(message, ops.Broadcast) or cost.in_one_hop(
            [message.tensor.nbytes], circle.charges, circle.group
        ):
            pending.ends = self._travel(pending)
        return pending

    def _circle(self, op: Op) -> Circle:
        if not isinstance(op, ops.Among):
            return self._all
        return self._inside if op.inside else self._across

    def wait(self, pending: Pending) -> Any:
        ends, now = pending.ends, self.clock()
        if ends is None:
            start = max(now, self._wire)
            ends = self._travel(pending)
            self._windows.append(Window(start, start, ends))
        elif ends > now:
            self._windows.append(self._window(pending, ends))
        self.wait_until(ends)
        return shaped(pending.op, pending.circle.group)

    def carried(self, total: float, largest: float, smallest: float) -> float:
        return carried(total, largest, smallest, self.group.size)

    def gather_objects(self, value: Any, name: str = "comparing") -> list[Any]:
        return [value] * self.group.size

    def close(self) -> None: ...
    def abandon(self) -> None: ...

    # - Time ---------------------------------------------------------------------------

    def clock(self) -> float:
        """Seconds: the time of whoever is running."""
        return self.now if self._at is None else self._at

    def wait_until(self, moment: float) -> None:
        """The queue waits, if the moment is still to come."""
        self._at = max(self.clock(), moment)

    def work(self, seconds: float) -> None:
        """The processor works for an exchange: on the queue, or in the training.

        Seconds as where all ranks work at once.
        """
        if self._at is None:
            self.charge(seconds)
            self.compute(seconds)
        else:
            seconds *= self.overhead
            self.charge(seconds)
            self._keep_busy(seconds)
            self._worked_for += seconds

    def _keep_busy(self, seconds: float) -> None:
        """The queue works for so long, or longer where the training thread does."""
        if seconds:
            now, shared = self.clock(), [(self.now, self._until)]
            self._at = stretched(now, seconds, shared, self.network.sharing)
            if self._far:
                self._own = self._recent(self._own)
                self._at = _take(self._own, now, self._at - now)
            self._worked.append((now, self._at))

    def charge(self, seconds: float) -> None:
        """The processor works for so long, if all ranks work at once."""
        self.processor += seconds * self.network.share

    def expect(self, seconds: float) -> None:
        """The training thread will compute for so long, as far as it knows.

        Where the queue has no processor of its own, its work takes longer until then.
        """
        self._until = self.now + seconds

    def rest(self, seconds: float) -> None:
        """The training thread waits for something that nothing here slows down."""
        self.now += seconds

    def compute(self, seconds: float) -> None:
        """The training thread computes: slower while other threads are busy."""
        self.now = self.computed(self.now, seconds)

    def computed(self, start: float, seconds: float) -> float:
        """When the training thread ends what it begins to compute at `start`."""
        self.inside = self._recent(self.inside)
        self._worked = self._recent(self._worked)
        self.beside = self._recent(self.beside)
        busy = [i for i in self.busy if i[1] > start]
        if self.inside or self.beside:
            busy = union([*busy, *self.inside, *self.beside])
        taken, network = union([*self._worked, *self.beside]), self.network
        return held_up(
            start, seconds, busy, network.interference, taken, network.sharing
        )

    def _recent(self, intervals: list[Interval]) -> list[Interval]:
        """Those that may still matter: time only goes on."""
        return [each for each in intervals if each[1] > self.now]

    def _travel(self, pending: Pending) -> float:
        """Put a request behind what is on the wire; when it will have been answered."""
        late = self.network.spread * self._worked_for  # the last of the ranks
        self._worked_for = 0.0
        group, network, _, weightless = pending.circle
        seconds = cost.seconds(pending.op, group, network)
        if pending.circle is self._inside:
            # Lanes take turns: what is submitted later may come earlier.
            recent = self._recent(self._inner)
            start = gap(recent, self.clock() + late, seconds)
            ends = self._starved(pending, start, seconds)
            self._inner = union([*recent, (start, ends)])
            return ends
        if weightless is not None:
            on_its_way = cost.seconds(pending.op, group, weightless)
            self._leaving = self._recent(self._leaving)
            start = self.clock() + late
            return _take(self._leaving, start, seconds - on_its_way) + on_its_way
        start = max(self.clock() + late, self._wire)
        self._wire = ends = self._starved(pending, start, seconds)
        return ends

    def _starved(self, pending: Pending, start: float, seconds: float) -> float:
        """When what leaves at `start` ends: later, inside hosts whose ranks compute."""
        group, network, _, _ = pending.circle
        if network.starved == 1.0 or not seconds:
            return start + seconds
        longer = cost.seconds(pending.op, group, network.computing())
        return stretched(start, seconds, [(self.now, self._until)], longer / seconds)

    def _window(self, pending: Pending, ends: float) -> Window:
        start, op, size = self.clock(), pending.op, pending.circle.group.size
        if self._far or isinstance(op, ops.Swap) or self._is_small(op, size):
            return Window(start, ends, ends)
        hops = (1 + isinstance(op, ops.Mean | ops.AllReduce)) * (size - 1)
        tail = (ends - start) / hops
        return Window(ends - tail, ends, ends)

    def _is_small(self, op: Op, size: int) -> bool:
        """Whether it is a sum of which everybody is sent all."""
        if not isinstance(op, ops.AllReduce) or size > self.network.one_hop_ranks:
            return False
        return op.tensor.nbytes <= self.network.small_bytes


def _take(busy: list[Interval], start: float, seconds: float) -> float:
    """When what may begin at `start` ends, beside what comes first; adds it to that."""
    ends = stretched(start, seconds, busy, math.inf)
    busy[:] = union([*busy, (start, ends)])
    return ends
