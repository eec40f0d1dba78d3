"""A training run on the virtual clock: the real engine, with nothing to train.

`Step` decides on the order, as in training; `Actions` charges what it takes. Here is
what the program does: forward, backward and step(), at the speed of a trace.
"""

from __future__ import annotations

from gradtide.core.step import Step
from gradtide.planner.clock.transport import VirtualTransport
from gradtide.planner.data.device import Device
from gradtide.planner.network import Network
from gradtide.planner.steps.actions import Actions
from gradtide.planner.steps.curvature import MakeParts, Second, busiest
from gradtide.planner.steps.parts import Parts
from gradtide.planner.trace import StepTrace, Unit
from gradtide.runtime.layout.buckets import LARGE
from gradtide.scheme import Scheme

MAX_CREDIT = 50e-3  # seconds: after a longer stall, a replay does not catch up


class Run:
    """A training run on the virtual clock; with `parts`, K-FAC as another program's."""

    def __init__(
        self,
        trace: StepTrace,
        scheme: Scheme,
        network: Network,
        parts: MakeParts = Parts,
    ) -> None:
        trace = with_optimizer(trace, network.device)
        if network.stragglers:
            trace = trace.slower(network.slowest(scheme.schedule.every))
        self.trace, self.scheme = trace, scheme
        self.transport = VirtualTransport(network, busiest(trace, scheme, network))
        # Of a replay, only what is done to gradients and parameters is work.
        self._model = self.transport.rest if trace.replayed else self.transport.compute
        self._credit = 0.0  # seconds that a replay has waited in advance
        # Of the last step: when its forward, loss and update began, and its end.
        self.marks = (0.0,) * 4
        self.actions = actions = Actions(trace, scheme, self.transport)
        self._step = Step(actions, scheme.schedule)
        self._of = {s.position: b for b in actions.buckets for s in b.slots}
        if scheme.preconditioner is not None:
            config, engine = scheme.preconditioner, actions.engine
            full, laid = self._step.full, actions.buckets
            actions.second = Second(trace, config, engine, laid, full, parts)
            actions.stage = actions.second.stage

    def step(self) -> None:
        """One forward, backward and step()."""
        actions, clock = self.actions, self.transport.clock
        begin = clock()
        actions.begin()
        self._forward()
        start, loss = actions.own(), clock()
        self._model(self.trace.loss)
        self._backward()
        actions.spent["backward"] += actions.own() - start
        if self._step.held:
            self._expect(self.trace.forward)
        update = clock()
        self._step.step()
        self._step.stepped()
        actions.count += 1
        self.marks = begin, loss, update, clock()

    def flush(self) -> None:
        """Apply what is due, from the last bucket to the first."""
        self._step.flush()

    def _forward(self) -> None:
        actions = self.actions
        self._step.forward()
        for place in self.trace.forward_order:
            self._step.apply([self._of[place]])
            start = self.transport.clock()
            self._model(self.trace.units[place].forward)
            passed = self.transport.clock() - start
            actions.spent["forward"] += passed
            actions.rested += passed if self.trace.replayed else 0.0
            if actions.second is not None:
                actions.second.moment("A", place)

    def _backward(self) -> None:
        self._step.begin()
        actions, take_in = self.actions, self.transport.network.device.take_in
        left = self.trace.backward + take_in.each * self.trace.numel
        for place, unit in enumerate(self.trace.units):
            left -= unit.backward + take_in.each * unit.numel
            if actions.second is not None:
                actions.second.moment("G", place)
            if self.trace.replayed:
                self._replay(unit)
            else:
                self.transport.compute(unit.backward)
            if unit.numel >= LARGE and actions.eager:
                self.transport.work(take_in(unit.numel))
            self._of[place].missing -= 1
            self._expect(left)
            self._step.full()
        self._step.end(arrived=True)

    def _expect(self, seconds: float) -> None:
        """Tell the queue that the training thread has so much to compute."""
        slower = 1.0 if self.trace.replayed else self.transport.network.sharing
        self.transport.expect(seconds * slower)

    def _replay(self, unit: Unit) -> None:
        """Write a gradient within the wait, as gradtide.lab.workloads.replay does."""
        start, take_in = self.transport.clock(), self.transport.network.device.take_in
        written = self.transport.computed(start, take_in(unit.numel))
        ends = max(written, start + unit.backward - self._credit)
        behind = ends - start - unit.backward
        self._credit = min(max(self._credit + behind, 0.0), MAX_CREDIT)
        self.actions.rested += ends - written
        self.transport.rest(ends - start)


def with_optimizer(trace: StepTrace, device: Device) -> StepTrace:
    """The trace, with an optimizer's step as the device has it if it knows of none."""
    if trace.optimizer:
        return trace
    return trace.optimized(device.optimizer(trace.numel))
