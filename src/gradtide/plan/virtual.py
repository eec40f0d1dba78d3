"""A training step on the virtual clock: the real engine, with nothing to train.

[Note: The order of a step] A step does what `backward` and `updates` do, in their
order: gradients are taken in as they get ready, full buckets are launched in plan
order, the last is not held; the "used" flags follow; means are waited for at the end
of backward, or released at step() from the last bucket to the first and applied before
a parameter of theirs is read. Guard: tests/plan/test_order.py, against a real replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import nn

from gradtide import fusion as fusions
from gradtide.bucket import Bucket, Payload
from gradtide.collectives import Dense
from gradtide.engine import Engine
from gradtide.fusion import Fusion
from gradtide.layout import LARGE, GradientBucket, lay_out
from gradtide.ops import AllReduce, Cut, Flow, Group
from gradtide.plan import cost
from gradtide.plan.network import Device, Network
from gradtide.plan.rehearsal import Work, script_of, scripts, settled
from gradtide.plan.trace import StepTrace
from gradtide.plan.transport import VirtualTransport as VirtualTransport
from gradtide.scheme import Scheme

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Prediction:
    """One step, in seconds; a mean over the steps after the first.

    `forward`, `backward` (with the loss) and `apply` (the optimizer) are the training
    thread's own; `exposed` is what it waits for the lane. `select` is what flows take
    up to their first request, and `exchange` what requests are waited for, on the lane,
    mostly hidden. `limit` is what no step of this schedule can be shorter than: compute
    and wire at full rate, without any start-up (`gradtide.lab.limits`).
    """

    step: float
    forward: float
    backward: float
    select: float
    exchange: float
    apply: float
    exposed: float
    sent_bytes: float  # of payload, by a rank
    limit: float
    buckets: int


def simulate(
    trace: StepTrace, scheme: Scheme, network: Network, steps: int = 3
) -> Prediction:
    """A step of training `trace` by `scheme` on `network`, as it goes on for long.

    `steps` are run, 2 or more; the first one is left out. Pure and deterministic.
    Raises ValueError for a collective that cannot be rehearsed, and whatever the
    scheme's fusion raises.
    """
    if steps < 2:
        raise ValueError(f"steps={steps}: the first is left out, so 2 or more")
    run = Run(trace, scheme, network)
    run.step()
    first, start = len(run.engine.records), run.transport.clock()
    sent = run.transport.payload_bytes
    run.engine.exposed_seconds = run.engine.select_seconds = 0.0
    run.spent = Spent()
    for _ in range(steps - 1):
        run.step()
    count = steps - 1
    records = list(run.engine.records)[first:]
    before = sum(r.payload_bytes for r in records if not r.second) / count
    after = sum(r.payload_bytes for r in records if r.second) / count
    spent = run.spent
    return Prediction(
        step=(run.transport.clock() - start) / count,
        forward=spent.forward / count,
        backward=spent.backward / count,
        select=run.engine.select_seconds / count,
        exchange=sum(r.end - r.start for r in records) / count,
        apply=spent.apply / count,
        exposed=run.engine.exposed_seconds / count,
        sent_bytes=(run.transport.payload_bytes - sent) / count,
        limit=_limit(trace, scheme, network, before, after),
        buckets=len(run.homes),
    )


@dataclass
class Spent:
    """Seconds of the training thread."""

    forward: float = 0.0
    backward: float = 0.0
    apply: float = 0.0


@dataclass(frozen=True)
class Rehearsed:
    """The script of a collective in the place of the collective."""

    transport: VirtualTransport
    collective: object
    shapes: Sequence[tuple[int, ...]]
    step: Callable[[], int]

    def reduce(self, load: Payload, group: Group) -> Flow:
        played = scripts(
            self.collective,  # type: ignore[arg-type]
            load.flat.numel(),
            load.flat.dtype,
            tuple(self.shapes),
            group.size,
        )
        script, device = script_of(played, self.step()), self.transport.network.device
        for act in script.acts:
            self.transport.work(_seconds(act.work, script.selector, device))
            if not act.asked:
                yield Cut(load.flat)
            elif act.several:
                yield act.asked
            else:
                yield act.asked[0]
        self.transport.work(_seconds(script.work, script.selector, device))
        return load.flat


def _seconds(work: Work, selector: str, device: Device) -> float:
    """What the processor takes; nothing for nothing."""
    return (
        (device.selecting(selector)(work.scanned) if work.scanned else 0.0)
        + (device.take_in(work.moved) if work.moved else 0.0)
        + (device.scatter(work.entries) if work.entries else 0.0)
    )


class Run:
    """A training run on the virtual clock."""

    def __init__(self, trace: StepTrace, scheme: Scheme, network: Network) -> None:
        self.trace, self.device = trace, network.device
        if getattr(trace, "replayed", False):  # waits that nothing slows down
            network = replace(network, interference=1.0)
        self.transport = VirtualTransport(network)
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
        self.transport.compute(self.trace.loss)
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
            self.transport.compute(self.trace.units[place].forward)
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


def exchange_seconds(nbytes: int, scheme: Scheme, network: Network) -> float:
    """Seconds of one exchange of a bucket of `nbytes` of float32, alone on the lane."""
    numel = max(-(-nbytes // 4 // network.size), 1) * network.size
    flat = torch.empty(numel, device="meta")
    load = Payload(flat, [flat])
    transport = VirtualTransport(network)
    engine = Engine(transport, transport.clock)
    rehearsed = Rehearsed(transport, scheme.collective, [(numel,)], lambda: 2)
    bucket = Bucket("alone", load, rehearsed, lambda _: None)
    engine.launch(bucket)
    engine.finish(bucket)
    return transport.clock()


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


def _limit(
    trace: StepTrace, scheme: Scheme, network: Network, first: float, second: float
) -> float:
    """As gradtide.lab.limits: compute, and the bytes of a rank at the ring's rate."""
    inter, intra = network.inter.ring.beta, (network.intra or cost.FREE).ring.beta
    beta = inter if network.hosts > 1 else intra
    first, second = first * beta, second * beta
    forward = trace.forward + trace.loss
    if scheme.schedule.update == "forward":
        forward, second = max(forward, second), 0.0
    if scheme.schedule.launch == "backward":
        return forward + trace.backward + first + second
    return forward + max(trace.backward, first + second)
