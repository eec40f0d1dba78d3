"""What each action of a step takes: the driver of a `Step` on the virtual clock.

[Note: Passes] Before the optimizer's step a local one compares parameters with what the
last exchange left. Afterwards it takes differences, restores, adds to what was left
behind, adds the mean, owes what was sent ahead, and remembers. All are passes over
memory, each at the cost of taking gradients in. A trace does not tell whether the
optimizer is Adam, whose steps are weighed on the lane: that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradtide.bucket import settled, traits
from gradtide.engine import Engine
from gradtide.gradients import LARGE, GradientBucket
from gradtide.ops import AllReduce
from gradtide.plan.curvature import MakeParts, Second
from gradtide.plan.cutting import buckets
from gradtide.plan.played import Rehearsed
from gradtide.plan.trace import StepTrace
from gradtide.plan.transport import VirtualTransport
from gradtide.preconditioning import Launchable
from gradtide.scheme import Scheme
from gradtide.step import Stage

BEFORE, OFFERED, SETTLED = 1, 3, 3  # passes: see [Note: Passes]


@dataclass
class Spent:
    """Seconds of the training thread; `apply` is the optimizer's and K-FAC's."""

    forward: float = 0.0
    backward: float = 0.0
    apply: float = 0.0


class Actions:
    """Charges what a step's actions take, with the real engine and the real flows.

    `full` is called when a bucket of factors is full.
    """

    recording = False

    def __init__(
        self,
        trace: StepTrace,
        scheme: Scheme,
        transport: VirtualTransport,
        full: Callable[[], None],
        parts: MakeParts,
    ) -> None:
        self.trace, self.transport = trace, transport
        self.device = transport.network.device
        self.engine = Engine(transport, transport.clock)
        self.local = scheme.schedule.launch == "step"
        self.count, self.spent = 1, Spent()  # as if it had gone on for long
        self.rested = 0.0  # seconds of a replay's waits in this step
        self.idle = 0.0  # of them, those before anything of the step was sent
        self._sent = False  # anything of this step
        # Of a deferred step, second halves are on their way meanwhile.
        self._deferred = scheme.schedule.update == "forward"
        self.buckets = buckets(trace, scheme, transport.network)
        self._used: Callable[[], object] | None = None
        inner = settled(scheme.collective)
        self._ranks = 0 if traits(inner).dense else transport.group.size
        if self._ranks:
            transport.overhead = self.device.overhead_of(type(inner).__name__)
        for bucket in self.buckets:
            own = [trace.units[slot.position] for slot in bucket.slots]
            shapes = [getattr(unit, "shape", ()) or (unit.numel,) for unit in own]
            bucket.collective = Rehearsed(
                transport, scheme.collective, shapes, lambda: self.count
            )
        self.second: Second | None = None
        if scheme.preconditioner is not None:
            config = scheme.preconditioner
            self.second = Second(trace, config, self.engine, self.buckets, full, parts)

    def begin(self) -> None:
        """A step begins with its forward."""
        self.rested, self._sent = 0.0, False

    def own(self) -> float:
        """Seconds that the training thread has not waited, nor computed factors."""
        own = self.transport.clock() - self.engine.telemetry.exposed_seconds
        return own if self.second is None else own - self.second.told.seconds

    def _updated(self, start: float) -> None:
        self.spent.apply += self.own() - start

    # - What a step does ---------------------------------------------------------------

    def plan(self) -> Sequence[Launchable]:
        return self.buckets if self.second is None else self.second.steps.plan()

    def prepare(self) -> None: ...

    def fill(self, bucket: Any) -> None:
        if not bucket.keeps:
            assert self.second is not None
            self.second.kfac.leave(bucket)
        elif self.local:
            self._pass(bucket, OFFERED)
        else:
            units = [self.trace.units[slot.position] for slot in bucket.slots]
            small = sum(unit.numel for unit in units if unit.numel < LARGE)
            self.transport.work(self.device.take_in(small))

    def _pass(self, bucket: GradientBucket, passes: int) -> None:
        start, numel = self.own(), bucket.load.flat.numel()
        self.transport.work(self.device.take_in(passes * numel))
        self._updated(start)

    def launch(self, bucket: Any, hold: bool) -> None:
        if not self._sent:
            self._sent, self.idle = True, 0.0 if self._deferred else self.rested
        bucket.launch(self.engine, hold)

    def collect(self) -> None:
        if self.second is not None:
            self.second.kfac.collect()

    def ask(self) -> None:
        numel = len(self.trace.units) + self._ranks
        flags = torch.empty(numel, dtype=torch.int32, device="meta")
        self._used = self.engine.ask("used", lambda: AllReduce(flags))

    def follow(self, hold: bool) -> None:
        if self.second is not None:
            self.second.kfac.invert(hold)

    def check(self) -> None:
        """All ranks hear of alarms at once."""
        self._together("finite", self.transport.group.size + 1)

    def _together(self, name: str, numel: int) -> None:
        flags = torch.empty(numel, dtype=torch.int32, device="meta")
        self.engine.ask(name, AllReduce(flags))()

    def promise(self) -> None: ...

    def withdraw(self, dropped: bool) -> None: ...

    def receive(self, bucket: GradientBucket) -> None:
        bucket.finish(self.engine)

    def learn(self) -> None:
        if self._used is not None:
            self._used()
            self._used = None

    def deliver(self) -> None: ...

    def dropped(self) -> None: ...

    def drop(self, bucket: GradientBucket) -> None: ...

    def settle(self) -> None: ...

    def update(self, fresh: bool) -> None:
        start = self.own()
        if self.second is not None:
            self.second.steps.precondition(self.second.optimizer, _itself)
        self.transport.compute(self.trace.optimizer)
        self._updated(start)
        if self.local:
            for bucket in self.buckets:
                self._pass(bucket, BEFORE)
            self._together("alike", 1)

    def defer(self) -> None:
        if self.second is not None:
            self.second.steps.defer(self.second.optimizer)

    def release(self, bucket: GradientBucket) -> None:
        assert bucket.flight is not None
        self.engine.release([bucket.flight])
        if self.second is not None and bucket.stage is Stage.DUE:
            self.second.steps.release(bucket, _itself)

    def deferred(self) -> None: ...

    def refuse(self, bucket: GradientBucket) -> None: ...

    def needs(self, bucket: GradientBucket) -> Iterable[GradientBucket]:
        return () if self.second is None else self.second.steps.needs(bucket)

    def apply(self, bucket: GradientBucket) -> None:
        if self.local:
            self._pass(bucket, SETTLED)
            return
        start = self.own()
        if self.second is not None:
            self.second.steps.update(bucket, _itself)
        units = [self.trace.units[slot.position] for slot in bucket.slots]
        self.transport.compute(sum(unit.optimizer for unit in units))
        self._updated(start)


def _itself(p: nn.Parameter) -> Tensor:
    """What stands for a gradient."""
    return p
