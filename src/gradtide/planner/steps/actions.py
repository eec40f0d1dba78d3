"""What each action of a step takes: the driver of a `Step` on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gradtide.collectives.levels import by_levels
from gradtide.core.engine import Engine
from gradtide.core.levels import levels_of
from gradtide.core.ops import AllReduce
from gradtide.core.payload import settled, traits
from gradtide.core.step import Stage
from gradtide.planner.clock.transport import VirtualTransport
from gradtide.planner.rehearsal.rehearsal import Rehearsed, buckets
from gradtide.planner.steps.curvature import Laid, Second
from gradtide.planner.steps.exchange import exchange_of
from gradtide.planner.trace import StepTrace, Unit
from gradtide.runtime.exchange.preconditioned import Launchable, Preconditioning
from gradtide.runtime.exchange.unpreconditioned import Unpreconditioned
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.notices import COUNT
from gradtide.scheme import Scheme


class Actions:
    """Charges what a step's actions take, with the real engine and the real flows."""

    recording = False

    def __init__(
        self, trace: StepTrace, scheme: Scheme, transport: VirtualTransport
    ) -> None:
        self.trace, self.transport = trace, transport
        self.device = transport.network.device
        self.engine = Engine(transport, transport.clock)
        self.engine.levels = levels_of(transport.group, scheme.levels)
        size, number = transport.group.size, len(trace.units)
        self.exchange = exchange_of(scheme, size, number, self._units)
        self.eager = self.exchange.eager
        self.count = 1  # of steps: as if it had gone on for long
        # Seconds of the training thread; "apply" is the optimizer's and K-FAC's.
        self.spent = dict.fromkeys(("forward", "backward", "apply"), 0.0)
        # Of a deferred step, second halves are on their way meanwhile.
        self._deferred = scheme.schedule.update == "forward"
        self.buckets = buckets(trace, scheme, transport.network)
        self._used: Callable[[], object] | None = None
        inner = settled(scheme.collective)
        self._ranks = transport.group.size if traits(inner).residual else 0
        if self._ranks:
            transport.overhead = self.device.overhead_of(type(inner).__name__)
        for bucket in self.buckets:
            units = self._units(bucket)
            shapes = tuple(unit.shape or (unit.numel,) for unit in units)
            rehearsed = Rehearsed(transport, inner, shapes, lambda: self.count)
            bucket.collective = by_levels(rehearsed, scheme.levels)
        self.second: Second | None = None  # K-FAC
        laid = Laid(self.buckets, {})
        self.stage: Preconditioning | Unpreconditioned = Unpreconditioned(laid)

    def begin(self) -> None:
        """A step begins with its forward."""
        self.rested = 0.0  # seconds of a replay's waits in this step
        self.idle = 0.0  # of them, those before anything of the step was sent
        self._sent = False  # anything of this step

    def own(self) -> float:
        """Seconds that the training thread has not waited, nor computed factors."""
        own = self.transport.clock() - self.engine.telemetry.exposed_seconds
        return own if self.second is None else own - self.second.told.seconds

    def _units(self, bucket: GradientBucket) -> list[Unit]:
        return [self.trace.units[slot.position] for slot in bucket.slots]

    def _updated(self, start: float) -> None:
        self.spent["apply"] += self.own() - start

    # - What a step does ---------------------------------------------------------------

    def _nothing(self, *_: object, **__: object) -> None:
        """What takes no time."""

    prepare = refuse = _nothing

    def plan(self) -> Sequence[Launchable]:
        return self.stage.plan()

    def fill(self, bucket: Any) -> None:
        if bucket.keeps:
            start = self.own()
            self._pass(self.exchange.filled(bucket))
            if not self.eager:  # after the optimizer's step
                self._updated(start)
        else:
            self.stage.leave(bucket)

    def _pass(self, numel: int) -> None:
        self.transport.work(self.device.take_in(numel))

    def launch(self, bucket: Any, hold: bool) -> None:
        if not self._sent:
            self._sent, self.idle = True, 0.0 if self._deferred else self.rested
        bucket.launch(self.engine, hold)

    def collect(self) -> None:
        if numel := self.exchange.flags[0]:  # all ranks hear of alarms at once
            self.engine.ask("finite", _flags(numel))()
        self.stage.collect()

    def conclude(self, hold: bool) -> None:
        # Who used what, who met what is not finite; notices, a wish for norms, and
        # three numbers of a GradScaler.
        numel = len(self.trace.units) + self._ranks + COUNT + 4
        norms = hold and self.second is not None  # see `deferred.tally`
        if norms:
            numel += len(self.trace.units) + 2 * len(self.buckets)
        flags = _flags(numel, torch.float64 if norms else torch.int32)
        self._used = self.engine.ask("used", flags, settled=norms)
        self.stage.invert(hold)

    def receive(self, bucket: GradientBucket) -> None:
        bucket.finish(self.engine)

    def deliver(self) -> None:
        if self._used is not None:
            self._used()
            self._used = None

    def update(self, fresh: bool) -> None:
        start = self.own()
        if self.second is not None:
            self.stage.precondition(self.second.optimizer)
        self.transport.compute(self.trace.optimizer)
        self._updated(start)
        for bucket in self.buckets if self.exchange.before else ():
            start = self.own()
            self._pass(self.exchange.before * bucket.payload.flat.numel())
            self._updated(start)
        if numel := self.exchange.flags[1]:  # heard when the exchange is over
            self.engine.ask("alike", _flags(numel))

    def defer(self) -> None:
        if self.second is not None:
            self.stage.defer(self.second.optimizer)

    def release(self, bucket: GradientBucket) -> None:
        assert bucket.flight is not None
        self.engine.release(bucket.flight)
        if bucket.stage is Stage.DUE:
            self.stage.release(bucket)

    def needs(self, bucket: GradientBucket) -> Iterable[GradientBucket]:
        self.deliver()
        return self.stage.needs(bucket)

    def here(self, bucket: GradientBucket) -> bool:
        return False  # as in host memory

    def apply(self, buckets: Sequence[GradientBucket]) -> None:
        for bucket in buckets:
            start = self.transport.clock()
            self._apply(bucket)
            self.engine.telemetry.applied.append((start, self.transport.clock()))

    def _apply(self, bucket: GradientBucket) -> None:
        start, numel = self.own(), self.exchange.applied(bucket)
        if numel is not None:
            self._pass(numel)
            self._updated(start)
            return
        self.stage.update(bucket)
        seconds = sum(unit.optimizer for unit in self._units(bucket))
        self.transport.compute(seconds)
        self._updated(start)


def _flags(numel: int, dtype: torch.dtype = torch.int32) -> AllReduce:
    return AllReduce(torch.empty(numel, dtype=dtype, device="meta"))
