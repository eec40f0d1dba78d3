"""Drives flows over a transport.

[Note: order] A flow runs on the transport's queue, to its end or to the `Cut` at which
it is to be held, and only then does the next submitted piece of work run. What is
submitted, and in which order, is decided by the training thread from the program alone:
launches in plan order, releases in forward order. Nothing looks at completion, time or
load, so every rank puts the same requests on the wire in the same order (guard:
tests/core/test_engine.py).

[Note: Closed] A flow that fails is closed at once: what it does to its bucket when it
is closed may not happen later, when somebody begins anew with that. Who only collects
it as garbage would not know when (guard: tests/collectives/test_vanished.py).

[Note: Two links] A flow that hands links over has three stages: inside the host,
between hosts, inside again. The middle ones of all flows run in that order, and so do
the first and the last, each beside the others: while one bucket is between hosts, the
next is summed inside and the one before is told inside. Which stages a submission has
is known when it is submitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gradtide.core import ops
from gradtide.core.levels import Levels
from gradtide.core.ops import Cut, Flow, Group, Handover, Op
from gradtide.core.telemetry import Record, Telemetry
from gradtide.core.torch_internals import record_function
from gradtide.core.transport import CommunicationError, Job, Ticket, Transport


@dataclass(eq=False)
class InFlight:
    """A flow on its way; with `hold` it stops at its `Cut` until it is released."""

    name: str
    flow: Flow
    hold: bool = False
    hands_over: bool = False  # see [Note: Two links]
    in_turn: bool = False  # what it does relies on what earlier ones have done
    begun: bool = False  # has selected what to send
    turned: bool = False  # is past its Cut
    ticket: Ticket | None = None
    asked: Op | tuple[Op, ...] | None = None
    label: str = ""  # of what was asked
    pending: Any = None
    sent: int = 0  # bytes of payload, to have it answered
    total: int = 0  # bytes, of all that was asked so far
    part: Tensor | None = None  # this rank's share of the mean, while held at the Cut
    mean: Any = None  # what the flow returned


class Engine:
    """Launches flows, holds them at their cut, releases and finishes them.

    All methods are called from the training thread, by every rank in the same order.
    `clock` tells seconds; a virtual transport brings its own.
    """

    def __init__(
        self, transport: Transport, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.transport, self.clock = transport, clock
        self.telemetry = Telemetry()
        self.levels: Levels | None = None  # where hosts have several ranks
        self.undoes = False  # exchanges that fail are undone: what leaves is kept
        self.progress = 0  # exchanges of buckets that have taken effect, if so
        self._sent = 0  # bytes, over transports before this one

    def __str__(self) -> str:
        """Who averages, and how, for the log."""
        size, hosts = self.group.size, len(self.transport.hosts)
        averaging = "host by host" if self.levels else "all ranks alike"
        kind = type(self.transport).__name__
        return f"{size} ranks on {hosts} hosts, {averaging}, by {kind}"

    @property
    def group(self) -> Group:
        """This rank, and how many there are."""
        return self.transport.group

    @property
    def sent_bytes(self) -> int:
        """Bytes of payload that this rank has sent."""
        return self._sent + self.transport.payload_bytes

    def dense_bytes(self, nbytes: int) -> int:
        """Bytes that this rank would send to average so many of a bucket as they are.

        Over its host's link, where that has several ranks.
        """
        group = self.transport.group if self.levels is None else self.levels.outer
        size = group.size
        return 2 * (size - 1) * nbytes // size

    def move(self, transport: Transport) -> None:
        """Go on over another transport; nothing is under way."""
        self._sent += self.transport.payload_bytes
        self.transport = transport

    def launch(
        self,
        name: str,
        flow: Flow,
        hold: bool = False,
        settled: bool = False,
        hands_over: bool = False,
        in_turn: bool = False,
    ) -> InFlight:
        """Send a flow on its way; what it works on is its own until it is finished.

        It may select what to send while what was launched before is still on its way;
        or, with `settled`, only when all of that is at its cut or its end. A flow that
        `hands_over` links has three stages, see [Note: Two links]. One that goes on
        `in_turn` does nothing behind its first request, nor behind its cut, before all
        earlier ones are at their cut or their end, however long that takes.
        """
        if hold:
            flow = ops.in_halves(flow, self.group)
        flight = InFlight(name, flow, hold, hands_over, in_turn)
        begin = partial(self._resume, flight)
        # A flow that is held has its last stage when it is released: if it has no
        # cut, it is not held and has it here.
        work = partial(self._run, flight, hold, through=hold)
        advance = _stay if in_turn else partial(self._run, flight, hold, False)
        if settled:

            def both() -> None:
                begin()
                work()

            job = Job(_nothing, both, settled=True, name=name)
        elif hands_over:

            def first() -> None:
                begin()
                self._run(flight, hold)

            last = None if hold else self._last(flight)
            job = Job(begin, work, first, last, name=name, advance=advance)
        else:
            job = Job(begin, work, name=name, advance=advance)
        with record_function(f"gradtide::{name}::launch"):
            flight.ticket = self.transport.submit(job)
        return flight

    def wait(self, flight: InFlight) -> None:
        """Wait until a held flow is at its cut, or at its end if it has none."""
        assert flight.ticket is not None
        start = self.clock()
        with record_function(f"gradtide::{flight.name}::wait"):
            try:
                flight.ticket.join()
            except CommunicationError:
                if flight.ticket.done():  # no queue is at work on it
                    flight.flow.close()
                raise
        self.telemetry.wait(start, self.clock())

    def here(self, flight: InFlight) -> bool:
        """Whether a flow that is not held has come to its end."""
        assert flight.ticket is not None
        return flight.ticket.done()

    def release(self, flight: InFlight) -> None:
        """Start a second half. The first to be needed is released first.

        What is not held is on its way to its end already.
        """
        if not flight.hold:
            return

        def leave() -> None:
            # Not yet at its cut if this begins early, not again if it did.
            if flight.part is not None:
                flight.part = None
                self._resume(flight)

        def run() -> None:
            leave()
            self._run(flight, hold=False)

        def go_on(here: Callable[[Any], bool]) -> None:
            leave()
            # Until it is at its cut, its first half is another job's.
            if flight.turned:
                self._run(flight, False, False, here)

        flight.hold = False
        after = self._last(flight) if flight.hands_over else None
        job = Job(leave, run, after=after, name=flight.name, advance=go_on)
        if flight.in_turn:
            job = Job(_nothing, run, after=after, name=flight.name)
        with record_function(f"gradtide::{flight.name}::release"):
            flight.ticket = self.transport.submit(job)

    def finish(self, flight: InFlight) -> Any:
        """Wait for a flow that is not held; returns what it came to."""
        assert not flight.hold, f"{flight.name} is held: release it first"
        self.wait(flight)
        return flight.mean

    def ask(
        self, name: str, op: Op | Callable[[], Op], settled: bool = False
    ) -> Callable[[], Any]:
        """Put one request in line; call what is returned to wait for its answer.

        A request that is still to be made is made on the queue, when all that was
        launched before has selected what to send; or, with `settled`, has come to its
        cut or its end.
        """

        def flow() -> Flow:
            answer: Tensor = yield op() if callable(op) else op
            return answer

        flight = self.launch(name, self.carried(flow()), settled=settled)
        return lambda: self.finish(flight)

    def carried(self, flow: Flow) -> Flow:
        """A flow made for all ranks, carried out host by host where there are levels.

        That of a bucket is made for levels already.
        """
        return flow if self.levels is None else self.levels.carried(flow)

    def _last(self, flight: InFlight) -> Callable[[], None]:
        """The last stage of a flow that hands links over."""

        def after() -> None:
            if isinstance(flight.asked, Handover):
                self._resume(flight)
                self._run(flight, hold=False)

        return after

    def _resume(self, flight: InFlight, answer: Any = None) -> None:
        """Run a flow to what it asks for next, and start that (on the queue)."""
        start = self.clock()
        try:
            asked = flight.flow.send(answer)
        except StopIteration as stop:
            flight.asked, flight.mean = None, stop.value
            return
        flight.asked = asked
        if isinstance(asked, Handover):
            return
        if not (flight.begun or ops.is_inside(asked)):
            flight.begun = True
            self.telemetry.select_seconds += self.clock() - start
        if isinstance(asked, Cut):
            return
        several = asked if isinstance(asked, tuple) else (asked,)
        flight.label = "+".join([ops.name_of(op) for op in several])
        sent = self.transport.payload_bytes
        with record_function(f"gradtide::{flight.name}::{flight.label}::issue"):
            try:
                flight.pending = [self.transport.issue(op) for op in several]
            except CommunicationError:
                flight.flow.close()
                raise
        # Beside what stays in a host another thread counts what does not.
        stays = self.levels is not None and all(
            ops.is_inside(op) or isinstance(op, ops.ToHost) for op in several
        )
        flight.sent = 0 if stays else self.transport.payload_bytes - sent
        flight.total += flight.sent

    def _run(
        self,
        flight: InFlight,
        hold: bool,
        through: bool = False,
        here: Callable[[Any], bool] | None = None,
    ) -> None:
        """Drive a flow to its end, or to its cut if it holds there (on the queue).

        It ends where links are handed over, too, unless it is to go `through`; and
        where an answer is not `here`, if that is given: by default it is waited for.
        What is behind a cut where it holds is for who releases it, also if that began.
        """
        while flight.asked is not None and not (hold and flight.turned):
            if isinstance(flight.asked, Handover):
                if not through:
                    return
                self._resume(flight)
            elif not isinstance(flight.asked, Cut):
                if here is not None and not all(map(here, flight.pending)):
                    return
                self._resume(flight, self._answer(flight))
            elif hold:
                flight.turned, flight.part = True, flight.asked.part
                return
            else:
                flight.turned = True
                self._resume(flight)

    def _answer(self, flight: InFlight) -> Any:
        """Wait for what a flow asked for, and record it."""
        pending, flight.pending = flight.pending, None
        start = self.clock()
        with record_function(f"gradtide::{flight.name}::{flight.label}"):
            try:
                answers = tuple([self.transport.wait(one) for one in pending])
            except CommunicationError as error:
                flight.flow.close()
                raise CommunicationError(f"{error} [{flight.name}]") from error
        if flight.label != ops.ToHost.__name__:  # which does not travel
            assert flight.asked is not None
            seen = flight.name, flight.label, flight.sent, start, self.clock()
            inside = ops.is_inside(flight.asked)
            self.telemetry.record(Record(*seen, flight.turned, inside))
        return answers if isinstance(flight.asked, tuple) else answers[0]


def _nothing() -> None: ...


def _stay(here: Callable[[Any], bool]) -> None: ...
