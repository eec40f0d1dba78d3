"""What is timed on a link with a token bucket: how much, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradtide.core.ops import Group, Op, is_inside, message_of
from gradtide.core.transport import Job
from gradtide.planner.clock.cost import FREE, seconds
from gradtide.planner.measure import measure_link
from gradtide.planner.measuring import bench as benches
from gradtide.planner.measuring.bench import Bench
from gradtide.planner.measuring.fit import beyond_burst, fit
from gradtide.planner.measuring.request_timing import Kind, kinds, sweep
from gradtide.planner.network import Link, Network

pytestmark = pytest.mark.alone

ALPHA, MEETING = 3e-4, 2e-3  # seconds of a start, and of a meeting of all ranks
SIZE = 8


class Shaped:
    """A transport whose ranks are all alike, on a clock of its own.

    Starting takes the processor and not the link, which saves up `burst` bytes at most
    of what it is idle for.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self.group = Group(0, SIZE)
        self.time, self.saved, self.burst, self.beta = 0.0, burst, burst, 8 / rate
        self.counts: dict[str, int] = {}

    def pass_time(self, took: float) -> None:
        self.time += took
        self.saved = min(self.burst, self.saved + took / self.beta)

    def submit(self, job: Job) -> Any:
        job.begin()
        job.work()
        return SimpleNamespace(join=lambda: None)

    def issue(self, op: Op) -> Op:
        return op

    def wait(self, op: Op) -> None:
        inside, op = is_inside(op), message_of(op)
        name = ("inside " if inside else "") + type(op).__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        hop = {"one_hop_bytes": 1 << 40} if inside else {}
        starts, carried = (
            seconds(op, self.group, Network(SIZE, 1, Link.of(*ones), **hop))
            for ones in ((1.0, 0.0), (0.0, 1.0))
        )
        self.pass_time(starts * ALPHA)
        free = min(self.saved, carried)
        self.saved -= free
        self.time += (carried - free) * self.beta

    def gather_objects(self, value: Any) -> list[Any]:
        self.pass_time(MEETING)
        return [value] * SIZE


@pytest.fixture
def shaped(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Shaped]:
    def make(rate: float) -> Shaped:
        transport = Shaped(rate, max(rate / 8000, 36_000))  # as the lab has it
        clock = SimpleNamespace(perf_counter=lambda: transport.time)
        monkeypatch.setattr(benches, "time", clock)
        return transport

    return make


def _bench(transport: Shaped) -> Bench:
    return Bench(transport, torch.device("cpu"))  # type: ignore[arg-type]


RATES = [50e6, 200e6, 1e9]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rate", RATES)
def test_beta_is_the_links(
    rate: float, known: bool, shaped: Callable[[float], Shaped]
) -> None:
    transport = shaped(rate)
    like = Network(SIZE, 1, FREE, rate=rate if known else None)
    link, rows = measure_link(_bench(transport), like, 20.0)
    assert {row.field for row in rows} == {"ring", "direct", "swap", "broadcast", ""}
    for found in (link.ring, link.direct, link.swap, link.broadcast):
        assert found.beta == pytest.approx(8 / rate, rel=0.03)
        assert found.alpha < 2 * ALPHA


def test_inside_a_host_direct_messages_are_the_hop_that_training_makes(
    shaped: Callable[[float], Shaped],
) -> None:
    transport = shaped(1e9)
    like = Network(1, SIZE, FREE, intra=FREE, rate=1e9)
    link, rows = measure_link(_bench(transport), like, 20.0)
    assert transport.counts["inside ReduceScatter"] > 3
    assert transport.counts["inside AllGather"] > 3
    assert "AllToAll" not in transport.counts
    (direct,) = (row for row in rows if row.field == "direct")
    assert {p.starts for p in direct.points} == {SIZE - 1}
    assert link.direct.beta == pytest.approx(8e-9, rel=0.03)


@pytest.mark.parametrize("budget", [2.0, 20.0, 60.0])
@pytest.mark.parametrize("rate", RATES)
def test_the_time_is_what_was_asked_for(
    rate: float, budget: float, shaped: Callable[[float], Shaped]
) -> None:
    transport = shaped(rate)
    measure_link(_bench(transport), Network(SIZE, 1, FREE, rate=rate), budget)
    assert 0.3 * budget < transport.time < 1.3 * budget


def test_a_link_too_slow_for_the_time_is_asked_little(
    shaped: Callable[[float], Shaped],
) -> None:
    transport = shaped(1e6)
    measure_link(_bench(transport), Network(SIZE, 1, FREE, rate=1e6), 1.0)
    assert transport.counts.pop("ReduceScatter") == 3
    assert set(transport.counts) == {"AllToAll", "Swap"}
    assert max(transport.counts.values()) < 15


def _named(bench: Bench, name: str) -> Kind:
    return next(k for k in kinds(bench, Network(SIZE, 1, FREE)) if k.name == name)


def test_half_of_the_time_is_for_the_largest_size(
    shaped: Callable[[float], Shaped],
) -> None:
    transport = shaped(50e6)
    bench = _bench(transport)
    found = sweep(bench, _named(bench, "AllToAll"), 10.0, Network(SIZE, 1, FREE))
    sizes = sorted({point.nbytes for point in found})
    largest = [point.seconds for point in found if point.nbytes == sizes[-1]]
    assert len(sizes) >= 4
    assert sizes[0] == 1 << 12
    assert 3.0 < sum(largest) < 6.0
    kept, _ = beyond_burst(found, 50e6)
    assert fit(kept).beta == pytest.approx(1.6e-7, rel=0.02)


class Far(Shaped):
    """The same, where messages are on their way for long after they have left.

    A request that finds the link idle has less of it than one that waits in line.
    """

    IDLE = 1.2  # times as long

    def __init__(self, rate: float, like: Network) -> None:
        super().__init__(rate, 0.0)
        self.like, self.left = like, 0.0

    def submit(self, job: Job) -> Any:
        job.begin()  # which asks `issue`
        answered = self.answered
        return SimpleNamespace(join=lambda: self.until(answered))

    def until(self, moment: float) -> None:
        self.time = max(self.time, moment)

    def issue(self, op: Op) -> Op:
        name = type(op).__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        charged = replace(self.like, inter=Link.of(0.0, self.beta))
        leaves = seconds(op, self.group, charged)
        if self.left <= self.time:
            leaves *= self.IDLE
        self.left = max(self.left, self.time) + leaves
        self.answered = self.left + seconds(op, self.group, self.like)
        return op


@pytest.mark.parametrize("budget", [0.5, 5.0, 60.0])
@pytest.mark.parametrize("rate", [50e6, 1e9])
def test_far_links_are_measured_as_training_uses_them(
    rate: float, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several requests on their way; and a ring starts as its messages do."""
    like = Network(SIZE, 1, FREE, rate=rate).delayed(0.04)
    transport = Far(rate, like)
    clock = SimpleNamespace(perf_counter=lambda: transport.time)
    monkeypatch.setattr(benches, "time", clock)
    link, rows = measure_link(_bench(transport), like, budget)
    assert link.direct.beta == pytest.approx(8 / rate, rel=0.05)
    assert link.direct.alpha * (SIZE - 1) == pytest.approx(0.02, rel=0.1)
    assert link.ring.beta == pytest.approx(8 / rate, rel=0.05)
    assert link.ring.alpha == pytest.approx(0.02, rel=0.1)
    assert ("ring" in {row.field for row in rows}) == (budget > 10)
    assert transport.time < 1.5 * max(budget, 10.0)
