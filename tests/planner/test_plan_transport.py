"""Two times: the training thread's and the queue's, and how they meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradtide.collectives import Dense
from gradtide.core.engine import Engine, InFlight
from gradtide.core.ops import AllReduce, Flow, Group, Swap
from gradtide.core.payload import Payload
from gradtide.planner.clock.transport import VirtualTransport
from gradtide.planner.network import Device, Line, Link, Network, Rate
from gradtide.transport.links import FAR_TRACKS

FREE = Link.of(0.0, 0.0)
N = 10**6  # elements of a bucket
SECOND = Network(2, 1, Link.of(0.0, 1 / (4.0 * N)))  # a swap of N takes one second


class Asking:
    """Works, then swaps, `times` times over."""

    def __init__(self, transport: VirtualTransport, work: float, times: int) -> None:
        self.transport, self.work, self.times = transport, work, times

    def reduce(self, payload: Payload, group: Group) -> Flow:
        for _ in range(self.times):
            self.transport.work(self.work)
            yield Swap(payload.flat, 1)
        return payload.flat


def engine_of(transport: VirtualTransport) -> Engine:
    return Engine(transport, transport.clock)


def launch(engine: Engine, name: str, collective: Any, hold: bool = False) -> InFlight:
    flat = torch.empty(N, device="meta")
    flow = collective.reduce(Payload(flat, [flat]), engine.group)
    return engine.launch(name, flow, hold)


def spans(engine: Engine) -> list[tuple[str, float, float]]:
    return [
        (r.bucket, pytest.approx(r.start), pytest.approx(r.end))
        for r in engine.telemetry.records
    ]


def test_the_lane_works_while_the_training_thread_computes() -> None:
    transport = VirtualTransport(SECOND)
    engine = engine_of(transport)
    transport.compute(2.0)
    one = launch(engine, "a", Asking(transport, 0.25, 1))
    assert transport.clock() == 2.0
    transport.compute(1.0)
    engine.finish(one)
    assert transport.clock() == 3.25
    assert engine.telemetry.exposed_seconds == 0.25
    assert engine.telemetry.select_seconds == 0.25
    assert spans(engine) == [("a", 2.25, 3.25)]


def test_a_work_item_begins_while_the_one_before_waits() -> None:
    """Selection hides behind the wire, and requests follow each other on it."""
    transport = VirtualTransport(SECOND)
    engine = engine_of(transport)
    both = [launch(engine, name, Asking(transport, 0.5, 1)) for name in "ab"]
    for one in both:
        engine.finish(one)
    # a selects until .5, travels until 1.5; b selects until 1, and waits for the wire.
    assert transport.clock() == 2.5


@pytest.mark.parametrize(
    ("times", "ends"),
    [
        ((1, 1), 5.0),  # b leaves at 1, as soon as a has left, and is 1 + 3 on its way
        ((2, 1), 8.0),  # a is answered at 4, and again at 8; b was at 5
        ((1, 2), 9.0),
        ((1, 1, 1), 6.0),
        ((2, 2, 2), 10.0),  # each goes on when it is answered, at 4, 5 and 6
        ((2, 1, 1, 1, 1), 9.0),  # what a sends from 4 to 5 goes before e's
    ],
)
def test_a_far_wire_is_free_while_messages_are_on_their_way(
    times: tuple[int, ...], ends: float
) -> None:
    transport = VirtualTransport(SECOND.delayed(6.0))
    engine = engine_of(transport)
    items = [
        launch(engine, name, Asking(transport, 0.0, n))
        for name, n in zip("abcde", times, strict=False)
    ]
    for item in items:
        engine.finish(item)
    assert transport.clock() == ends


def test_of_items_between_far_hosts_only_some_are_under_way() -> None:
    transport = VirtualTransport(SECOND.delayed(40.0))
    engine = engine_of(transport)
    asking = Asking(transport, 0.0, 1)
    items = [launch(engine, str(i), asking) for i in range(FAR_TRACKS + 1)]
    for item in items:
        engine.finish(item)
    # The first is answered at 21, and the last begins then.
    assert transport.clock() == 42.0


def test_the_thread_of_far_ranks_does_one_thing_at_a_time() -> None:
    transport = VirtualTransport(SECOND.delayed(6.0))
    engine = engine_of(transport)
    items = [launch(engine, name, Working(transport, 0.5, 2.0)) for name in "ab"]
    for item in items:
        engine.finish(item)
    # a is answered at 4.5, and works until 6.5; b is answered at 5.5, and waits.
    assert transport.clock() == 8.5


def test_of_a_far_wire_the_earlier_item_has_what_it_needs() -> None:
    transport = VirtualTransport(SECOND.delayed(6.0))
    engine = engine_of(transport)
    items = [
        launch(engine, "a", Asking(transport, 0.0, 2)),
        launch(engine, "b", Asking(transport, 0.0, 1)),
    ]
    for item in items:
        engine.finish(item)
    last = launch(engine, "c", Asking(transport, 0.0, 1))
    engine.finish(last)
    # Of the first 8 seconds three were sent in, all before the fifth ended.
    assert transport.clock() == 8.0 + 4.0


class Working:
    """Works before each swap, and at the end."""

    def __init__(self, transport: VirtualTransport, *works: float) -> None:
        self.transport, self.works = transport, works

    def reduce(self, payload: Payload, group: Group) -> Flow:
        *before, last = self.works
        for seconds in before:
            self.transport.work(seconds)
            yield Swap(payload.flat, 1)
        self.transport.work(last)
        return payload.flat


def test_ranks_that_share_processors_come_late_from_work() -> None:
    transport = VirtualTransport(replace(SECOND, spread=0.2))
    engine = engine_of(transport)
    one = launch(engine, "a", Asking(transport, 0.5, 2))
    engine.finish(one)
    assert transport.clock() == pytest.approx(2 * (0.5 + 0.1 + 1.0))


def test_what_begins_early_is_not_late_from_work_that_comes_later() -> None:
    transport = VirtualTransport(replace(SECOND, spread=0.2))
    engine = engine_of(transport)
    both = [
        launch(engine, "a", Working(transport, 0.25, 1.0)),
        launch(engine, "b", Working(transport, 0.25, 0.0, 0.0)),
    ]
    for one in both:
        engine.finish(one)
    # a travels from .3 to 1.3 and works until 2.3; b, which was ready at .55, travels
    # meanwhile, and again from 2.3 + .2 on: a's work was before its second swap.
    assert transport.clock() == pytest.approx(3.5)


def test_the_processor_is_charged_for_work_and_requests() -> None:
    rate = Rate(0.0, 0.0, 0.0, Line(1e-3, 1e-9))
    link = Link(rate, rate, rate, rate)
    device = Device(request=0.5)  # is part of what a request costs
    network = Network(2, 1, link, device=device, processors=0.5)
    transport = VirtualTransport(network)
    engine = engine_of(transport)
    one = launch(engine, "a", Asking(transport, 0.25, 2))
    engine.finish(one)
    transport.compute(1.0)  # is the model's
    transport.work(0.25)
    each = 1e-3 + 4 * N * 1e-9
    assert transport.processor == pytest.approx(0.5 * 3 * 0.25 + 2 * each)


def test_a_work_item_that_comes_later_begins_then() -> None:
    transport = VirtualTransport(SECOND)
    engine = engine_of(transport)
    first = launch(engine, "a", Asking(transport, 0.5, 1))
    transport.compute(1.25)  # a is on the wire until 1.5
    second = launch(engine, "b", Asking(transport, 0.5, 1))
    engine.finish(first)
    assert transport.clock() == 1.75  # the queue selects for b until then
    engine.finish(second)
    assert transport.clock() == 2.75


def test_what_begins_early_delays_the_rest_of_the_one_before() -> None:
    transport = VirtualTransport(SECOND)
    engine = engine_of(transport)
    first = launch(engine, "a", Asking(transport, 0.5, 2))
    second = launch(engine, "b", Asking(transport, 0.5, 1))
    engine.finish(first)
    # a's second swap queues behind b's first: .5 + 1 + 1 + .5 + 1.
    assert transport.clock() == 4.0
    engine.finish(second)
    assert transport.clock() == 4.0


def test_a_collective_of_gloo_starts_only_in_its_turn() -> None:
    transport = VirtualTransport(SECOND)
    engine = engine_of(transport)
    answer = engine.ask("flags", AllReduce(torch.empty(N, device="meta")))
    launch(engine, "a", Asking(transport, 0.5, 1))
    answer()
    # The queue looks for b when the all-reduce starts, which is when it came.
    assert transport.clock() == 1.0


def test_real_flows_run_on_tensors_without_memory() -> None:
    transport = VirtualTransport(Network(4, 1, Link.of(0.0, 1 / (4.0 * N))))
    engine = engine_of(transport)
    one = launch(engine, "a", Dense(), hold=True)
    engine.wait(one)
    assert one.part is not None
    assert one.part.numel() == N // 4
    assert transport.clock() == pytest.approx(0.75)
    engine.release(one)
    engine.finish(one)
    assert transport.clock() == pytest.approx(1.5)
    assert transport.payload_bytes == 2 * 3 * N


@pytest.mark.parametrize(("factor", "end"), [(1.0, 3.0), (2.0, 4.0)])
def test_compute_is_slower_while_the_lane_is_busy(factor: float, end: float) -> None:
    network = Network(2, 1, SECOND.inter, interference=factor)
    transport = VirtualTransport(network)
    engine = engine_of(transport)
    launch(engine, "a", Asking(transport, 1.0, 1))
    transport.compute(3.0)  # the queue is busy for 2 seconds, half of which are lost
    assert transport.clock() == end


@pytest.mark.parametrize(
    ("factor", "computes", "ends"),
    [(1.0, 2.0, 1.0), (3.0, 0.0, 1.0), (3.0, 1.5, 2.0), (3.0, 9.0, 3.0)],
)
def test_bytes_take_longer_inside_a_host_that_computes(
    factor: float, computes: float, ends: float
) -> None:
    network = Network(1, 2, FREE, SECOND.inter, starved=factor)
    transport = VirtualTransport(network)
    engine = engine_of(transport)
    transport.expect(computes)
    item = launch(engine, "a", Asking(transport, 0.0, 1))
    engine.finish(item)
    assert transport.clock() == ends


def test_between_hosts_they_do_not() -> None:
    transport = VirtualTransport(Network(2, 1, SECOND.inter, FREE, starved=3.0))
    engine = engine_of(transport)
    transport.expect(9.0)
    item = launch(engine, "a", Asking(transport, 0.0, 1))
    engine.finish(item)
    assert transport.clock() == 1.0
