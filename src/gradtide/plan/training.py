"""A training run on the virtual clock: the real engine, with nothing to train.

[Note: The order of a step] A step does what `backward` and `updates` do, in their
order: gradients are taken in as they get ready, full buckets are launched in plan
order, the last is not held; the "used" flags follow; means are waited for at the end
of backward, or released at step() from the last bucket to the first and applied before
a parameter of theirs is read. Guard: tests/plan/test_order.py, against a real replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradtide.collectives import Dense
from gradtide.engine import Engine
from gradtide.layout import LARGE, GradientBucket
from gradtide.ops import AllReduce
from gradtide.plan.curvature import MakeParts, Second, busiest
from gradtide.plan.cutting import buckets
from gradtide.plan.device import Device
from gradtide.plan.network import Network
from gradtide.plan.parts import Parts
from gradtide.plan.played import Rehearsed
from gradtide.plan.rehearsal import settled
from gradtide.plan.trace import StepTrace, Unit
from gradtide.plan.transport import VirtualTransport
from gradtide.preconditioning import Launchable
from gradtide.scheme import Scheme

CREDIT = 50e-3  # seconds: gradtide.lab.workloads.replay.MAX_CREDIT


@dataclass
class Spent:
    """Seconds of the training thread; `apply` is the optimizer's and K-FAC's."""

    forward: float = 0.0
    backward: float = 0.0
    apply: float = 0.0


class Run:
    """A training run on the virtual clock.

    With `parts`, K-FAC as another program has it.
    """

    def __init__(
        self,
        trace: StepTrace,
        scheme: Scheme,
        network: Network,
        parts: MakeParts = Parts,
    ) -> None:
        trace = with_optimizer(trace, network.device)
        self.trace, self.scheme, self.device = trace, scheme, network.device
        rank = busiest(trace, scheme, network, parts)
        self.transport = VirtualTransport(network, rank)
        # Of a replay, only what is done to gradients and parameters is work.
        self._model = self.transport.rest if trace.replayed else self.transport.compute
        self._credit = 0.0  # seconds that a replay has waited in advance
        self._rested = 0.0  # seconds of a replay's waits in this step
        self.idle = 0.0  # of them, those before anything of the step was sent
        self.engine = Engine(self.transport, self.transport.clock)
        self.homes = buckets(trace, scheme, network)
        self.count, self.spent = 1, Spent()  # as if it had gone on for long
        self._deferring = scheme.schedule.update == "forward"
        self._eager = scheme.schedule.launch == "ready"
        inner = settled(scheme.collective)
        self._dense = isinstance(inner, Dense)
        kind = type(inner).__name__
        if not self._dense:
            self.transport.overhead = self.device.overhead_of(kind)
        self._due: set[GradientBucket] = set()
        self._used: Callable[[], object] | None = None
        self._home = {slot.position: home for home in self.homes for slot in home.slots}
        for home in self.homes:
            own = [trace.units[slot.position] for slot in home.slots]
            shapes = [getattr(unit, "shape", ()) or (unit.numel,) for unit in own]
            home.bucket.collective = Rehearsed(
                self.transport, scheme.collective, shapes, lambda: self.count
            )
            home.rearm()
        self._cursor, self._open = 0, False  # launched in this step; in the backward
        self._early = False  # factors leave in the forward
        self._plan: tuple[object, Sequence[Launchable]] = (None, ())
        self.second: Second | None = None
        if scheme.preconditioner is not None:
            self.second = Second(
                trace,
                scheme.preconditioner,
                self.engine,
                self.homes,
                self._launch_factors,
                parts,
            )

    def step(self) -> None:
        """One forward, backward and step()."""
        self._rested = 0.0
        self._forward()
        start = self._own()
        self._model(self.trace.loss)
        self._backward()
        if not self._deferring:
            for home in self.homes:
                self.engine.finish(home.bucket)
            self._learn_used()
        self.spent.backward += self._own() - start
        if self._deferring:
            self._expect(self.trace.forward)
            self._release()
        else:
            start = self._own()
            if self.second is not None:
                self.second.steps.precondition(self.second.optimizer, self._read)
            self.transport.compute(self.trace.optimizer)
            self.spent.apply += self._own() - start
        self.count += 1

    def _expect(self, seconds: float) -> None:
        """Tell the lane that the training thread has so much to compute."""
        slower = 1.0 if self.trace.replayed else self.transport.network.sharing
        self.transport.expect(seconds * slower)

    def _own(self) -> float:
        """Seconds that the training thread has not waited, nor computed factors."""
        own = self.transport.clock() - self.engine.exposed_seconds
        return own if self.second is None else own - self.second.told.seconds

    def _read(self, p: nn.Parameter) -> Tensor:
        """A gradient, or what stands for it."""
        return p

    def _release(self) -> None:
        """As `Updates` does: let second halves go, in forward order."""
        second = self.second
        if second is not None:
            second.steps.defer(second.optimizer)
        for home in reversed(self.homes):
            self.engine.release([home.bucket])
            if second is not None:
                second.steps.release(home, self._read)
        self._due = set(self.homes)

    def flush(self) -> None:
        """Apply what is due, from the last bucket to the first."""
        for home in reversed(self.homes):
            self._before_read(home)

    def _forward(self) -> None:
        for place in self.trace.forward_order:
            self._before_read(self._home[place])
            start = self.transport.clock()
            self._model(self.trace.units[place].forward)
            passed = self.transport.clock() - start
            self.spent.forward += passed
            self._rested += passed if self.trace.replayed else 0.0
            if self.second is not None:
                self.second.moment("A", place)

    def _before_read(self, home: GradientBucket) -> None:
        if home not in self._due:
            return
        self._due.remove(home)
        self._arrive(home)
        self._learn_used()
        start = self._own()
        if self.second is not None:
            steps = self.second.steps
            groups = steps.needed(home)
            for other in steps.homes(groups):
                self._arrive(other)
            if groups:
                steps.apply(groups, self._read)
        units = [self.trace.units[slot.position] for slot in home.slots]
        self.transport.compute(sum(unit.optimizer for unit in units))
        self.spent.apply += self._own() - start

    def _arrive(self, home: GradientBucket) -> None:
        if home.bucket.name in self.engine.flying:
            self.engine.finish(home.bucket)

    def _backward(self) -> None:
        self._open = True
        writing = self.device.take_in.each
        left = self.trace.backward + writing * self.trace.numel
        for place, unit in enumerate(self.trace.units):
            left -= unit.backward + writing * unit.numel
            if self.second is not None:
                self.second.moment("G", place)
            if self.trace.replayed:
                self._replay(unit)
            else:
                self.transport.compute(unit.backward)
            home = self._home[place]
            if unit.numel >= LARGE:
                self.transport.work(self.device.take_in(unit.numel))
            home.missing -= 1
            self._expect(left)
            if self._eager:
                self._launch_full()
        self._open = False
        if self.second is not None:
            self.second.kfac.collect()
        while self._cursor < len(self._planned()):
            self._launch()
        self._cursor = 0
        ranks = 0 if self._dense else self.transport.group.size
        flags = torch.empty(
            len(self.trace.units) + ranks, dtype=torch.int32, device="meta"
        )
        self._used = self.engine.ask("used", lambda: AllReduce(flags))
        for home in self.homes:
            home.rearm()
        if self.second is not None:
            self.second.kfac.invert(self._deferring)
            self._early = True

    def _replay(self, unit: Unit) -> None:
        """Write a gradient within the wait, as gradtide.lab.workloads.replay does."""
        start = self.transport.clock()
        written = self.transport.computed(start, self.device.take_in(unit.numel))
        ends = max(written, start + unit.backward - self._credit)
        behind = ends - start - unit.backward
        self._credit = min(max(self._credit + behind, 0.0), CREDIT)
        self._rested += ends - written
        self.transport.rest(ends - start)

    def _planned(self) -> Sequence[Launchable]:
        """What leaves in this step, in order."""
        if self.second is None:
            return self.homes
        kfac = self.second.kfac
        key = kfac.factors, kfac.step
        if self._plan[0] != key:
            self._plan = key, self.second.steps.plan()
        return self._plan[1]

    def _launch_full(self) -> None:
        plan = self._planned()
        while self._cursor < len(plan) and not plan[self._cursor].missing:
            self._launch()

    def _launch_factors(self) -> None:
        """A bucket of factors is full."""
        if self._eager and (self._open or self._early):
            self._launch_full()

    def _launch(self) -> None:
        if not self._cursor:
            # Of a deferred step, second halves are on their way meanwhile.
            self.idle = 0.0 if self._deferring else self._rested
        home = self._planned()[self._cursor]
        if isinstance(home, GradientBucket):
            units = [self.trace.units[slot.position] for slot in home.slots]
            small = sum(unit.numel for unit in units if unit.numel < LARGE)
            self.transport.work(self.device.take_in(small))
            home.bucket.hold = self._deferring and home is not self.homes[-1]
        elif self.second is not None:
            self.second.kfac.leave(home)
        self.engine.launch(home.bucket)
        self._cursor += 1

    def _learn_used(self) -> None:
        if self._used is not None:
            self._used()
            self._used = None


def with_optimizer(trace: StepTrace, device: Device) -> StepTrace:
    """The trace, with an optimizer's step as the device has it if it knows of none."""
    if trace.optimizer:
        return trace
    return trace.optimized(device.optimizer(trace.numel))
