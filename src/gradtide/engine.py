"""Drives the flows of buckets over a transport.

[Note: order] A flow runs on the transport's lane, to its end or to the `Cut` at which
its bucket holds, and only then does the next submitted piece of work run. What is
submitted, and in which order, is decided by the training thread from the program alone:
launches in plan order, releases in forward order. Nothing looks at completion, time or
load, so every rank puts the same requests on the wire in the same order (guard:
tests/test_engine.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

# torch.profiler.record_function costs 30 us a call, this 1 us, with no profiler on.
from torch._C._profiler import _RecordFunctionFast as record_function

from gradtide.bucket import Bucket
from gradtide.ops import Cut, Flow, Op, ToHost
from gradtide.transport import Ticket, Transport

RECORDED = 1 << 16  # entries kept: more than the lab reads at once, 16 MB at most


class Record(NamedTuple):
    """A request that travelled: payload bytes sent, seconds of the engine's clock."""

    bucket: str
    request: str
    payload_bytes: int
    start: float
    end: float
    second: bool = False  # after the turn of its exchange


@dataclass(eq=False)
class Flight:
    """A flow on its way."""

    name: str
    flow: Flow
    begun: bool = False  # has selected what to send
    turned: bool = False  # is past its Cut
    ticket: Ticket | None = None
    asked: Op | tuple[Op, ...] | None = None
    pending: Any = None  # of what was asked
    part: Tensor | None = None  # this rank's share of the mean, while held at the Cut
    mean: Any = None  # what the flow returned


class Engine:
    """Launches buckets, holds them at their cut, releases and finishes them.

    All methods are called from the training thread, by every rank in the same order.
    `clock` tells seconds; a virtual transport brings its own.
    """

    def __init__(
        self, transport: Transport, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.transport, self.clock = transport, clock
        self.flying: dict[str, Flight] = {}  # in launch order
        self.records: deque[Record] = deque(maxlen=RECORDED)
        # Deferred updates: when each began and ended, seconds of the clock.
        self.applied: deque[tuple[float, float]] = deque(maxlen=RECORDED)
        # When the training thread waited for the lane, and how long in all.
        self.waited: deque[tuple[float, float]] = deque(maxlen=RECORDED)
        self.exposed_seconds = 0.0
        self.select_seconds = 0.0  # that flows took up to their first request
        self.selected = self.offered = 0  # entries taken out of buckets, and in them

    def launch(self, bucket: Bucket) -> None:
        """Send a bucket on its way; its payload is the flow's until it is finished."""
        assert bucket.name not in self.flying, f"{bucket.name} is in flight already"
        flow = bucket.collective.reduce(bucket.load, self.transport.group)
        flight = Flight(bucket.name, flow)
        self.flying[bucket.name] = flight
        flight.ticket = self.transport.submit(
            lambda: self._resume(flight), lambda: self._run(flight, bucket.hold)
        )

    def held(self, bucket: Bucket) -> tuple[Tensor | None, Tensor | None]:
        """This rank's part of a held bucket's mean, or the mean of one without a cut.

        Waits for the first half. What is returned may be changed in place until
        `release`.
        """
        flight = self.flying[bucket.name]
        self._join(flight)
        return flight.part, flight.mean

    def release(self, buckets: Iterable[Bucket]) -> None:
        """Start the second halves, in the order in which they will be needed."""
        for bucket in buckets:
            flight = self.flying[bucket.name]

            def leave(flight: Flight = flight) -> None:
                # Not yet at its cut if this begins early, not again if it did.
                if flight.part is not None:
                    flight.part = None
                    self._resume(flight)

            def run(flight: Flight = flight, leave: Callable[[], None] = leave) -> None:
                leave()
                self._run(flight, hold=False)

            flight.ticket = self.transport.submit(leave, run)

    def finish(self, bucket: Bucket) -> None:
        """Wait for a bucket that is not held, and deliver its mean."""
        flight = self.flying[bucket.name]
        self._join(flight)
        assert flight.mean is not None, f"{bucket.name} is held: release it first"
        del self.flying[bucket.name]
        load = bucket.load
        whole = flight.mean.data_ptr() == load.flat.data_ptr()
        self.selected += load.flat.numel() if whole else load.taken
        self.offered += load.flat.numel()
        load.taken = 0
        bucket.deliver(flight.mean)

    def drop(self, bucket: Bucket) -> bool:
        """Forget a held bucket: its mean is not wanted (a skipped step).

        Returns whether its memory had been handed out, so that it holds nothing now.
        """
        flight = self.flying.pop(bucket.name)
        self._join(flight)
        flight.flow.close()
        kept: Tensor = flight.mean if flight.part is None else flight.part
        memory = bucket.load.flat.untyped_storage().data_ptr()
        return kept.untyped_storage().data_ptr() == memory

    def ask(self, name: str, op: Op | Callable[[], Op]) -> Callable[[], Any]:
        """Put one request in line; call what is returned to wait for its answer.

        A request that is still to be made is made on the lane, when everything that was
        launched before has selected what to send.
        """

        def flow() -> Flow:
            answer: Tensor = yield op() if callable(op) else op
            return answer

        flight = Flight(name, flow())
        ticket = self.transport.submit(
            lambda: self._resume(flight), lambda: self._run(flight, hold=False)
        )

        def answer() -> Any:
            self._wait(ticket)
            return flight.mean

        return answer

    def clear(self) -> None:
        """Forget what was recorded."""
        self.records.clear()
        self.applied.clear()
        self.waited.clear()
        self.exposed_seconds = self.select_seconds = 0.0
        self.selected = self.offered = 0

    def _join(self, flight: Flight) -> None:
        assert flight.ticket is not None
        self._wait(flight.ticket)

    def _wait(self, ticket: Ticket) -> None:
        start = self.clock()
        ticket.join()
        end = self.clock()
        self.waited.append((start, end))
        self.exposed_seconds += end - start

    def _resume(self, flight: Flight, answer: Any = None) -> None:
        """Run a flow to what it asks for next, and start that (on the lane)."""
        start = self.clock()
        try:
            asked = flight.flow.send(answer)
        except StopIteration as stop:
            flight.asked, flight.mean = None, stop.value
            return
        if not flight.begun:
            flight.begun = True
            self.select_seconds += self.clock() - start
        flight.asked = asked
        if not isinstance(asked, Cut):
            with record_function(f"gradtide::{flight.name}::{_label(asked)}::issue"):
                flight.pending = [self.transport.issue(op) for op in _ops(asked)]

    def _run(self, flight: Flight, hold: bool) -> None:
        """Drive a flow to its end, or to its cut if it holds there (on the lane)."""
        while flight.asked is not None:
            if not isinstance(flight.asked, Cut):
                self._resume(flight, self._answer(flight))
            elif hold:
                flight.turned, flight.part = True, flight.asked.part
                return
            else:
                flight.turned = True
                self._resume(flight)

    def _answer(self, flight: Flight) -> Any:
        """Wait for what a flow asked for, and record it."""
        asked, pending = flight.asked, flight.pending
        flight.pending = None
        label, start = _label(asked), self.clock()
        with record_function(f"gradtide::{flight.name}::{label}"):
            answers = tuple(self.transport.wait(p) for p in pending)
        ops = _ops(asked)
        if not all(isinstance(op, ToHost) for op in ops):
            sent = sum(map(self.transport.sends, ops))
            end = self.clock()
            self.records.append(
                Record(flight.name, label, sent, start, end, flight.turned)
            )
        return answers if isinstance(asked, tuple) else answers[0]


def _ops(asked: Any) -> tuple[Op, ...]:
    return asked if isinstance(asked, tuple) else (asked,)


def _label(asked: Any) -> str:
    return "+".join(type(op).__name__ for op in _ops(asked))
