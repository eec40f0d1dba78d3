"""A training run on the virtual clock: the real engine, with nothing to train.

[Note: The order of a step] A step does what `backward` and `updates` do, in their
order: gradients are taken in as they get ready, full buckets are launched in plan
order, the last is not held; the "used" flags follow; means are waited for at the end
of backward, or released at step() from the last bucket to the first and applied before
a parameter of theirs is read. Guard: tests/plan/test_order.py, against a real replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import nn

from gradtide import fusion as fusions
from gradtide.collectives import Dense
from gradtide.engine import Engine
from gradtide.fusion import Fusion
from gradtide.layout import LARGE, GradientBucket, lay_out
from gradtide.ops import AllReduce
from gradtide.plan.device import Device
from gradtide.plan.network import Network
from gradtide.plan.played import Rehearsed, exchange_seconds
from gradtide.plan.rehearsal import settled
from gradtide.plan.trace import StepTrace, Unit
from gradtide.plan.transport import VirtualTransport
from gradtide.scheme import Scheme

CREDIT = 50e-3  # seconds: gradtide.lab.workloads.replay.MAX_CREDIT
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass
class Spent:
    """Seconds of the training thread."""

    forward: float = 0.0
    backward: float = 0.0
    apply: float = 0.0


class Run:
    """A training run on the virtual clock."""

    def __init__(self, trace: StepTrace, scheme: Scheme, network: Network) -> None:
        trace = with_optimizer(trace, network.device)
        self.trace, self.device = trace, network.device
        self.transport = VirtualTransport(network)
        # Of a replay, only what is done to gradients and parameters is work.
        self._model = self.transport.rest if trace.replayed else self.transport.compute
        self._ahead = 0.0  # seconds that a replay has waited in advance
        self.engine = Engine(self.transport, self.transport.clock)
        self.homes = buckets(trace, scheme, network)
        self.count, self.spent = 1, Spent()  # as if it had gone on for long
        self._deferring = scheme.schedule.update == "forward"
        self._eager = scheme.schedule.launch == "ready"
        self._dense = isinstance(settled(scheme.collective), Dense)
        self._due: set[GradientBucket] = set()
        self._used: Callable[[], object] | None = None
        self._home = {slot.position: home for home in self.homes for slot in home.slots}
        for home in self.homes:
            own = [trace.units[slot.position] for slot in home.slots]
            shapes = [getattr(unit, "shape", ()) or (unit.numel,) for unit in own]
            home.bucket.collective = Rehearsed(
                self.transport, scheme.collective, shapes, lambda: self.count
            )

    def step(self) -> None:
        """One forward, backward and step()."""
        self._forward()
        start = self.transport.clock() - self.engine.exposed_seconds
        self._model(self.trace.loss)
        self._backward()
        if not self._deferring:
            for home in self.homes:
                self.engine.finish(home.bucket)
            self._learn_used()
        own = self.transport.clock() - self.engine.exposed_seconds
        self.spent.backward += own - start
        if self._deferring:
            self.engine.release(home.bucket for home in reversed(self.homes))
            self._due = set(self.homes)
        else:
            self._apply(self.trace.optimizer)
        self.count += 1

    def flush(self) -> None:
        """Apply what is due, from the last bucket to the first."""
        for home in reversed(self.homes):
            self._before_read(home)

    def _forward(self) -> None:
        for place in self.trace.forward_order:
            self._before_read(self._home[place])
            start = self.transport.clock()
            self._model(self.trace.units[place].forward)
            self.spent.forward += self.transport.clock() - start

    def _before_read(self, home: GradientBucket) -> None:
        if home not in self._due:
            return
        self._due.remove(home)
        self.engine.finish(home.bucket)
        self._learn_used()
        self._apply(sum(self.trace.units[s.position].optimizer for s in home.slots))

    def _backward(self) -> None:
        cursor = 0
        missing = [len(home.slots) for home in self.homes]
        places = {home: i for i, home in enumerate(self.homes)}
        for place, unit in enumerate(self.trace.units):
            if self.trace.replayed:
                self._replay(unit)
            else:
                self.transport.compute(unit.backward)
            home = self._home[place]
            if unit.numel >= LARGE:
                self.transport.compute(self.device.take_in(unit.numel))
            missing[places[home]] -= 1
            while self._eager and cursor < len(self.homes) and not missing[cursor]:
                self._launch(cursor)
                cursor += 1
        for last in range(cursor, len(self.homes)):
            self._launch(last)
        ranks = 0 if self._dense else self.transport.group.size
        flags = torch.empty(
            len(self.trace.units) + ranks, dtype=torch.int32, device="meta"
        )
        self._used = self.engine.ask("used", lambda: AllReduce(flags))

    def _replay(self, unit: Unit) -> None:
        """Write a gradient within the wait, as gradtide.lab.workloads.replay does."""
        start = self.transport.clock()
        written = self.transport.computed(start, self.device.take_in(unit.numel))
        ends = max(written, start + unit.backward - self._ahead)
        behind = ends - start - unit.backward
        self._ahead = min(max(self._ahead + behind, 0.0), CREDIT)
        self.transport.rest(ends - start)

    def _launch(self, place: int) -> None:
        home = self.homes[place]
        units = [self.trace.units[slot.position] for slot in home.slots]
        small = sum(unit.numel for unit in units if unit.numel < LARGE)
        self.transport.compute(self.device.take_in(small))
        home.bucket.hold = self._deferring and place < len(self.homes) - 1
        self.engine.launch(home.bucket)

    def _apply(self, seconds: float) -> None:
        start = self.transport.clock()
        self.transport.compute(seconds)
        self.spent.apply += self.transport.clock() - start

    def _learn_used(self) -> None:
        if self._used is not None:
            self._used()
            self._used = None


def with_optimizer(trace: StepTrace, device: Device) -> StepTrace:
    """The trace, with an optimizer's step as the device has it if it knows of none."""
    if trace.optimizer:
        return trace
    seconds = device.optimizer(trace.numel)
    units = tuple(
        replace(unit, optimizer=seconds * unit.numel / max(trace.numel, 1))
        for unit in trace.units
    )
    return replace(trace, units=units, optimizer=seconds)


def buckets(trace: StepTrace, scheme: Scheme, network: Network) -> list[GradientBucket]:
    """The buckets that a replica would cut, without memory.

    The fusion is told the times of the trace, and what an exchange of so many bytes
    costs on the network (`exchange_seconds`).
    """

    @cache
    def seconds(nbytes: int) -> float:
        return exchange_seconds(nbytes, scheme, network)

    return lay_out(
        _named(trace), _Informed(scheme.fusion, trace, seconds), Dense(), network.size
    )


@dataclass(frozen=True)
class _Informed:
    """A fusion that is told the times of a trace and the cost of an exchange."""

    fusion: Fusion
    trace: StepTrace
    seconds: Callable[[int], float]

    def __call__(
        self, trace: fusions.Trace, cost: Callable[[int], float]
    ) -> list[slice]:
        units = self.trace.units
        if len(trace.nbytes) == len(units):
            trace = replace(
                trace,
                forward=[unit.forward for unit in units],
                backward=[unit.backward for unit in units],
            )
        return self.fusion(trace, self.seconds)


@lru_cache(maxsize=16)
def _named(trace: StepTrace) -> list[tuple[str, nn.Parameter]]:
    return [
        (
            unit.name,
            nn.Parameter(
                torch.empty(unit.numel, dtype=DTYPES[unit.itemsize], device="meta")
            ),
        )
        for unit in trace.units
    ]
