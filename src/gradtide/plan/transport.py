"""A transport on a virtual clock: what requests ask for takes time, and nothing else.

[Note: One lane, two clocks] The training thread and the lane have a time each. What is
submitted runs at once in the real order, but on the lane's time: from when the errand
before it has ended, or earlier. As on the real lane, an errand begins (it selects, and
posts its first request) as soon as all that is left of the one before is waiting.
Nothing ever looks at the time of the other thread, as nothing does in training: the
order is a function of the program (guard: tests/plan/test_virtual.py).

[Note: Moments to begin early] The real lane looks for the next errand where a request
has posted all its messages: a ring near its end, direct messages once the last has
left, swaps at any time, and Gloo's own collectives only when they start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradtide.ops import (
    AllReduce,
    AllToAll,
    Broadcast,
    Cut,
    Group,
    Op,
    Swap,
    ToHost,
    payload_bytes,
)
from gradtide.plan import cost
from gradtide.plan.answers import shaped
from gradtide.plan.intervals import Interval, held_up, stretched, union
from gradtide.plan.network import Network
from gradtide.transport.ring import carried

AHEAD = 6  # messages of a ring that are posted early: gradtide.transport.ring


@dataclass
class Clock:
    """The training thread's time, in seconds, and until when it goes on computing."""

    now: float = 0.0
    until: float = 0.0


@dataclass
class Window:
    """A wait of an errand: from when the next may begin, and when the answer is here.

    `last` is the latest moment at which the lane looks for the next errand.
    """

    opens: float
    last: float
    ends: float


@dataclass
class Errand:
    """What was submitted, and when it ends."""

    clock: Clock
    ends: float = 0.0

    def join(self) -> None:
        self.clock.now = max(self.clock.now, self.ends)


@dataclass
class Pending:
    """A request on its way; None: it starts when it is waited for."""

    op: Op
    ends: float | None


class VirtualTransport:
    """Answers requests after the time that they take on `network`.

    Answers have the right shape and no meaning (`answers.shaped`), so flows must not
    look at them: those on tensors without memory cannot, and `rehearsal` makes such
    flows of all collectives. With `beside`, a second lane on the same clock and wires.
    """

    def __init__(
        self,
        network: Network,
        rank: int = 0,
        beside: VirtualTransport | None = None,
    ) -> None:
        self.network = network
        self.group = Group(rank, network.size)
        self.payload_bytes = 0
        self.processor = 0.0  # seconds of the rank's, for exchanges
        self.overhead = 1.0  # times what is counted, that the lane works for longer
        self._charges = network.charged()
        self._time: Clock = Clock() if beside is None else beside._time
        others = [] if beside is None else [*beside._others, beside]
        self._others: list[VirtualTransport] = others
        for other in self._others:
            other._others.append(self)
        self._at: float | None = None  # the lane's time, while it is the lane's turn
        self._wire = 0.0  # busy until then
        self._last = Errand(self._time)
        self._windows: list[Window] = []
        self.busy: list[Interval] = []  # when the lane had an errand
        self.wired: list[Interval] = []  # when it had a request on the wire
        self._worked: list[Interval] = []  # when its processor worked; recent ones
        self._worked_for = 0.0  # seconds since the last request

    # - What a transport does ----------------------------------------------------------

    def submit(self, begin: Callable[[], None], work: Callable[[], None]) -> Errand:
        before, now = self._last, self._time.now
        window = next((w for w in self._windows if w.last >= now), None)
        early = window is not None and now < before.ends
        self._at = start = max(now, before.ends)
        if early and window is not None:
            self._at = start = max(now, window.opens)
            wire, self._wire = self._wire, window.ends
            # What the errand before works at its end comes after this.
            worked, self._worked_for = self._worked_for, 0.0
            begin()
            self._worked_for += worked
            self._yield_to(window, before, wire)
        else:
            begin()
        assert self._at is not None
        self._at = max(self._at, before.ends)
        self._windows = []
        work()
        self._last = Errand(self._time, self._at)
        if early:
            start, _ = self.busy.pop()
        self.busy.append((start, self._at))
        self._at = None
        return self._last

    def _yield_to(self, window: Window, before: Errand, wire: float) -> None:
        """The errand that was waiting goes on later for the one that has begun."""
        assert self._at is not None
        if window is self._windows[-1]:
            before.ends = max(before.ends, self._at)
            self._wire = max(wire, self._wire)
        else:
            late = max(self._at, self._wire) - window.ends
            before.ends += late
            self._wire = wire + late

    def sends(self, op: Op) -> int:
        """Bytes of payload a rank sends; of a broadcast, the average."""
        size = self.group.size
        if isinstance(op, Broadcast):
            return (size - 1) * op.tensor.numel() * op.tensor.element_size() // size
        if self._is_small(op):
            assert isinstance(op, AllReduce)
            return (size - 1) * op.tensor.numel() * op.tensor.element_size()
        return payload_bytes(op, self.group)

    def issue(self, op: Op) -> Pending:
        self.payload_bytes += self.sends(op)
        if isinstance(op, ToHost | Cut) or self.group.size == 1:
            return Pending(op, self.clock())
        worked, charged = self._worked_for, self.processor
        self.work(self.network.device.request)
        self._worked_for = worked
        # Posting it is part of what the request was measured to cost.
        posted = cost.seconds(op, self.group, self._charges)
        self.processor = charged + self.overhead * posted
        if isinstance(op, Broadcast) or self._is_collective(op):
            return Pending(op, None)
        return Pending(op, self._travel(op))

    def wait(self, pending: Pending) -> Any:
        op, ends = pending.op, pending.ends
        begun = ends is None
        if ends is None:
            start = max(self.clock(), self._wire)
            ends = self._travel(op)
            self._windows.append(Window(start, start, ends))
        assert self._at is not None
        if not isinstance(op, ToHost) and not begun and ends > self._at:
            self._windows.append(self._window(op, ends))
        self._at = max(self._at, ends)
        return shaped(op, self.group)

    def carried(self, total: float, largest: float, smallest: float) -> float:
        return carried(total, largest, smallest, self.group.size)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.group.size

    def close(self) -> None: ...

    # - Time ---------------------------------------------------------------------------

    def clock(self) -> float:
        """Seconds: the time of whoever is running."""
        return self._time.now if self._at is None else self._at

    def work(self, seconds: float) -> None:
        """The processor works for an exchange: on the lane, or in the training.

        Seconds as where all ranks work at once.
        """
        if self._at is not None:
            seconds *= self.overhead
        self.charge(seconds)
        if self._at is None:
            self.compute(seconds)
        elif seconds:
            shared = [(self._time.now, self._time.until)]
            ends = stretched(self._at, seconds, shared, self.network.sharing)
            self._worked.append((self._at, ends))
            self._worked_for += seconds
            self._at = ends

    def charge(self, seconds: float) -> None:
        """The processor works for so long, if all ranks work at once."""
        self.processor += seconds * self.network.share

    def occupy(self, interval: Interval) -> None:
        """Something keeps the processor of this lane busy, as its own work does."""
        self.busy.append(interval)
        self._worked.append(interval)

    def expect(self, seconds: float) -> None:
        """The training thread will compute for so long, as far as it knows.

        Where the lane has no processor of its own, its work takes longer until then.
        """
        self._time.until = self._time.now + seconds

    def rest(self, seconds: float) -> None:
        """The training thread waits for something that nothing here slows down."""
        self._time.now += seconds

    def compute(self, seconds: float) -> None:
        """The training thread computes: slower while a lane is busy."""
        self._time.now = self.computed(self._time.now, seconds)

    def computed(self, start: float, seconds: float) -> float:
        """When the training thread ends what it begins to compute at `start`."""
        lanes, network = [self, *self._others], self.network
        busy = self.busy if len(lanes) == 1 else union(i for t in lanes for i in t.busy)
        if network.sharing == 1.0:
            return stretched(start, seconds, busy, network.interference)
        for lane in lanes:  # time only goes on
            lane._worked = [i for i in lane._worked if i[1] > self._time.now]
        taken = union(i for t in lanes for i in t._worked)
        recent = [i for i in busy if i[1] > start]
        return held_up(
            start, seconds, recent, network.interference, taken, network.sharing
        )

    def _travel(self, op: Op) -> float:
        """Put a request behind what is on the wire; when it will have been answered."""
        late = self.network.spread * self._worked_for  # the last of the ranks
        self._worked_for = 0.0
        start = max(self.clock() + late, self._wire)
        seconds = cost.seconds(op, self.group, self.network)
        if self._others:
            wired = union(i for t in self._others for i in t.wired)
            self._wire = stretched(start, seconds, wired, self.network.contention)
        else:
            self._wire = start + seconds
        self.wired.append((start, self._wire))
        return self._wire

    def _window(self, op: Op, ends: float) -> Window:
        start = self.clock()
        if isinstance(op, Swap | AllReduce):
            return Window(start, ends, ends)
        rounds = max(self.group.size - 1, 1)
        tail = (ends - start) / rounds
        if isinstance(op, AllToAll):
            return Window(ends - tail, ends, ends)
        return Window(ends - tail, ends - tail / AHEAD, ends)

    def _is_small(self, op: Op) -> bool:
        n = self.network
        return (
            isinstance(op, AllReduce)
            and self.group.size <= n.one_hop_ranks
            and op.tensor.numel() * op.tensor.element_size() <= n.small_bytes
        )

    def _is_collective(self, op: Op) -> bool:
        return isinstance(op, AllReduce) and not self._is_small(op)
