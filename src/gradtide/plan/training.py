"""A training run on the virtual clock: the real engine, with nothing to train.

`Step` decides on the order, as in training; `Actions` charges what it takes. Here is
what the program does: forward, backward and step(), at the speed of a trace.
"""

from __future__ import annotations

from gradtide.gradients import LARGE
from gradtide.plan.actions import Actions
from gradtide.plan.curvature import MakeParts, busiest
from gradtide.plan.device import Device
from gradtide.plan.network import Network
from gradtide.plan.parts import Parts
from gradtide.plan.trace import StepTrace, Unit
from gradtide.plan.transport import VirtualTransport
from gradtide.scheme import Scheme
from gradtide.step import Step

CREDIT = 50e-3  # seconds: gradtide.lab.workloads.replay.MAX_CREDIT


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
        self.trace, self.scheme = trace, scheme
        rank = busiest(trace, scheme, network, parts)
        self.transport = VirtualTransport(network, rank)
        # Of a replay, only what is done to gradients and parameters is work.
        self._model = self.transport.rest if trace.replayed else self.transport.compute
        self._credit = 0.0  # seconds that a replay has waited in advance
        self.actions = Actions(
            trace, scheme, self.transport, lambda: self._step.full(), parts
        )
        self._step = Step(self.actions, scheme.schedule)
        self._of = {s.position: b for b in self.actions.buckets for s in b.slots}

    def step(self) -> None:
        """One forward, backward and step()."""
        actions = self.actions
        actions.begin()
        self._forward()
        start = actions.own()
        self._model(self.trace.loss)
        self._backward()
        actions.spent.backward += actions.own() - start
        if self._step.held:
            self._expect(self.trace.forward)
        self._step.step()
        self._step.stepped()
        actions.count += 1

    def flush(self) -> None:
        """Apply what is due, from the last bucket to the first."""
        self._step.flush()

    def _forward(self) -> None:
        actions = self.actions
        self._step.forward()
        for place in self.trace.forward_order:
            self._step.apply(self._of[place])
            start = self.transport.clock()
            self._model(self.trace.units[place].forward)
            passed = self.transport.clock() - start
            actions.spent.forward += passed
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
            if unit.numel >= LARGE and not actions.local:
                self.transport.work(take_in(unit.numel))
            self._of[place].missing -= 1
            self._expect(left)
            self._step.full()
        self._step.end(arrived=True)

    def _expect(self, seconds: float) -> None:
        """Tell the lane that the training thread has so much to compute."""
        slower = 1.0 if self.trace.replayed else self.transport.network.sharing
        self.transport.expect(seconds * slower)

    def _replay(self, unit: Unit) -> None:
        """Write a gradient within the wait, as gradtide.lab.workloads.replay does."""
        start, take_in = self.transport.clock(), self.transport.network.device.take_in
        written = self.transport.computed(start, take_in(unit.numel))
        ends = max(written, start + unit.backward - self._credit)
        behind = ends - start - unit.backward
        self._credit = min(max(self._credit + behind, 0.0), CREDIT)
        self.actions.rested += ends - written
        self.transport.rest(ends - start)


def with_optimizer(trace: StepTrace, device: Device) -> StepTrace:
    """The trace, with an optimizer's step as the device has it if it knows of none."""
    if trace.optimizer:
        return trace
    return trace.optimized(device.optimizer(trace.numel))
