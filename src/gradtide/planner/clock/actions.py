"""What each action of a step takes: the driver of a `Step` on the virtual clock.

[Note: Passes] Before the optimizer's step a local one compares parameters with what the
last exchange left. Afterwards it takes differences, restores, adds to what was left
behind, adds the mean, owes what was sent ahead, and remembers. Rounds of several steps
compare nothing; late means keep what was done meanwhile, and an outer momentum is
another tensor to read and write. All are passes over memory, each at the cost of taking
gradients in. A trace does not tell whether the optimizer is Adam, whose steps are
weighed on the queue: that is left out.
"""

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
from gradtide.planner.clock.curvature import Laid, Second
from gradtide.planner.clock.transport import VirtualTransport
from gradtide.planner.rehearsal.rehearsal import Rehearsed, buckets
from gradtide.planner.trace import StepTrace, Unit
from gradtide.runtime.exchange.preconditioned import Launchable, Preconditioning
from gradtide.runtime.layout.buckets import LARGE, GradientBucket
from gradtide.runtime.training import Unpreconditioned
from gradtide.scheme import Scheme

BEFORE, OFFERED, SETTLED = 1, 3, 3  # passes: see [Note: Passes]
LATE, MOMENTUM = 2, 3


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
        self.local = scheme.schedule.launch == "step"
        self._rounds = scheme.schedule.rounds
        momentum = scheme.outer is not None and scheme.outer.momentum > 0
        late = LATE if scheme.schedule.delay else 0
        self._settled = SETTLED + late + (MOMENTUM if momentum else 0)
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
        self.steps: Preconditioning | Unpreconditioned = Unpreconditioned(laid)

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
        return self.steps.plan()

    def fill(self, bucket: Any) -> None:
        if not bucket.keeps:
            self.steps.leave(bucket)
        elif self.local:
            self._pass(bucket, OFFERED)
        else:
            small = sum(u.numel for u in self._units(bucket) if u.numel < LARGE)
            self.transport.work(self.device.take_in(small))

    def _pass(self, bucket: GradientBucket, passes: int) -> None:
        start, numel = self.own(), bucket.payload.flat.numel()
        self.transport.work(self.device.take_in(passes * numel))
        self._updated(start)

    def launch(self, bucket: Any, hold: bool) -> None:
        if not self._sent:
            self._sent, self.idle = True, 0.0 if self._deferred else self.rested
        bucket.launch(self.engine, hold)

    def collect(self) -> None:
        if self.local:  # all ranks hear of alarms at once
            size = self.transport.group.size
            # In rounds also what is trained, and a checksum of what leaves.
            more = len(self.trace.units) + 2 * size if self._rounds else 0
            self.engine.ask("finite", _flags(size + 2 + more))()
        else:
            self.steps.collect()

    def conclude(self, hold: bool) -> None:
        # Who used what, who met what is not finite; two flags, three of a GradScaler.
        numel = len(self.trace.units) + self._ranks + 5
        norms = hold and self.second is not None  # see `runtime.tally`
        if norms:
            numel += len(self.trace.units) + 2 * len(self.buckets)
        flags = _flags(numel, torch.float64 if norms else torch.int32)
        self._used = self.engine.ask("used", flags, settled=norms)
        self.steps.invert(hold)

    def receive(self, bucket: GradientBucket) -> None:
        bucket.finish(self.engine)

    def deliver(self) -> None:
        if self._used is not None:
            self._used()
            self._used = None

    def update(self, fresh: bool) -> None:
        start = self.own()
        if self.second is not None:
            self.steps.precondition(self.second.optimizer)
        self.transport.compute(self.trace.optimizer)
        self._updated(start)
        if self.local and not self._rounds:
            for bucket in self.buckets:
                self._pass(bucket, BEFORE)
            self.engine.ask("alike", _flags(1 + len(self.trace.units)))()

    def defer(self) -> None:
        if self.second is not None:
            self.steps.defer(self.second.optimizer)

    def release(self, bucket: GradientBucket) -> None:
        assert bucket.flight is not None
        self.engine.release(bucket.flight)
        if bucket.stage is Stage.DUE:
            self.steps.release(bucket)

    def needs(self, bucket: GradientBucket) -> Iterable[GradientBucket]:
        self.deliver()
        return self.steps.needs(bucket)

    def here(self, bucket: GradientBucket) -> bool:
        return False  # as in host memory

    def apply(self, buckets: Sequence[GradientBucket]) -> None:
        for bucket in buckets:
            self._apply(bucket)

    def _apply(self, bucket: GradientBucket) -> None:
        if self.local:
            self._pass(bucket, self._settled)
            return
        start = self.own()
        self.steps.update(bucket)
        seconds = sum(unit.optimizer for unit in self._units(bucket))
        self.transport.compute(seconds)
        self._updated(start)


def _flags(numel: int, dtype: torch.dtype = torch.int32) -> AllReduce:
    return AllReduce(torch.empty(numel, dtype=dtype, device="meta"))
