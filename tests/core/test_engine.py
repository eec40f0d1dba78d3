"""The engine's order is a function of the program, and what holds, holds."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

import gradtide
from gradtide.collectives import Dense
from gradtide.collectives.levels import TwoLevel
from gradtide.core.engine import Engine, InFlight
from gradtide.core.ops import AllReduce, Flow, Group
from gradtide.core.payload import Payload
from gradtide.core.telemetry import RECORDED
from gradtide.transport import connect

AVERAGE = Dense()


def launch(engine: Engine, name: str, n: int, collective: Any = AVERAGE) -> InFlight:
    """Hold an average of the ranks' numbers."""
    flat = torch.full((n,), float(dist.get_rank()))
    flow = collective.reduce(Payload(flat, [flat]), engine.group)
    return engine.launch(name, flow, hold=True)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_issues_the_same_requests_whatever_the_clock(size: int) -> None:
    logs = run_ranks(size, _order)
    assert all(log == logs[0] for log in logs)
    scatters = [f"b{i}:ReduceScatter" for i in range(4)]
    gathers = [f"b{i}:AllGather" for i in reversed(range(4))]
    assert logs[0] == [*scatters, "probe:AllReduce", *gathers]


def _order() -> list[str]:
    size = dist.get_world_size()
    engine = Engine(connect(None, torch.device("cpu")))
    nap, flights = random.Random(dist.get_rank()), []
    for i in range(4):
        time.sleep(nap.random() / 50)
        flights.append(launch(engine, f"b{i}", size * 10**i))
    probe = engine.ask("probe", AllReduce(torch.ones(1)))
    time.sleep(nap.random() / 20)
    assert probe().item() == size
    for flight in reversed(flights):
        engine.release(flight)
    for flight in flights:
        time.sleep(nap.random() / 50)
        assert engine.finish(flight).eq((size - 1) / 2).all()
    engine.transport.close()
    return [f"{r.bucket}:{r.request}" for r in engine.telemetry.records]


def test_by_levels_the_order_of_each_link_is_the_same_on_every_rank() -> None:
    logs = run_ranks(4, _by_levels)
    assert all(log == logs[0] for log in logs)
    inside, between = logs[0]
    halves = [f"b{i}:ReduceScatter" for i in range(3)]
    assert between[:5] == [*halves, "b3:Mean", "probe:AllReduce"]
    assert between[5:] == [f"b{i}:AllGather" for i in (2, 1, 0)]
    scatters = [one for one in inside if one.endswith("Scatter")]
    assert scatters == [f"b{i}:ReduceScatter" for i in range(4)]
    gathers = [one for one in inside if one.endswith("Gather")]
    assert gathers == [f"b{i}:AllGather" for i in (3, 2, 1, 0)]


def _by_levels() -> tuple[list[str], list[str]]:
    engine = Engine(connect(None, torch.device("cpu")))
    nap, flights = random.Random(dist.get_rank()), []
    for i in range(4):
        time.sleep(nap.random() / 50)
        flat = torch.full((4 * 10**i,), float(dist.get_rank()))
        flow = TwoLevel(AVERAGE, 2).reduce(Payload(flat, [flat]), engine.group)
        over = {"hold": i < 3, "hands_over": True}  # the last is not held
        flights.append(engine.launch(f"b{i}", flow, **over))

    def message() -> AllReduce:
        assert all(f.part is not None for f in flights[:3])
        assert flights[3].mean.eq(1.5).all()
        return AllReduce(torch.ones(1))

    assert engine.ask("probe", message, settled=True)().item() == 4
    for flight in reversed(flights):
        engine.release(flight)
    for flight in flights:
        time.sleep(nap.random() / 50)
        assert engine.finish(flight).eq(1.5).all()
    engine.transport.close()
    seen = [(r.inside, f"{r.bucket}:{r.request}") for r in engine.telemetry.records]
    return [n for here, n in seen if here], [n for here, n in seen if not here]


def test_what_is_settled_is_made_when_all_before_is_at_its_cut() -> None:
    run_ranks(2, _settled)


def _settled() -> None:
    engine = Engine(connect(None, torch.device("cpu")))
    for _ in range(20):
        held, ended = launch(engine, "a", 6), launch(engine, "b", 6, NoCut())

        def message(held: InFlight = held, ended: InFlight = ended) -> AllReduce:
            assert held.part is not None
            return AllReduce(torch.stack([held.part.sum(), ended.mean.sum()]))

        answer = engine.ask("sums", message, settled=True)
        assert answer().tolist() == [3.0, 6.0]
        with pytest.raises(AssertionError, match="release it first"):
            engine.finish(held)
        engine.release(held)
        engine.release(ended)
        assert engine.finish(held).tolist() == [0.5] * 6
        assert engine.finish(ended).tolist() == [0.5] * 6
    engine.transport.close()


@dataclass(frozen=True)
class NoCut:
    """An algorithm without a second half."""

    def reduce(self, payload: Payload, group: Group) -> Flow:
        total, _ = yield AllReduce(payload.flat), AllReduce(torch.zeros(1))
        total /= group.size
        return payload.flat


def test_a_flow_without_a_cut_ends_while_it_is_held() -> None:
    run_ranks(2, _no_cut)


def _no_cut() -> None:
    engine = Engine(connect(None, torch.device("cpu")))
    flight = launch(engine, "a", 6, NoCut())
    engine.release(flight)
    assert engine.finish(flight).tolist() == [0.5] * 6
    seen = engine.telemetry
    assert seen.records[0].request == "AllReduce+AllReduce"
    assert seen.exposed_seconds > 0
    seen.clear()
    assert not seen.records
    engine.transport.close()


def test_what_is_recorded_is_bounded() -> None:
    run_ranks(1, _bounded)


def _bounded() -> None:
    engine = Engine(connect(None, torch.device("cpu")))
    for kept in (engine.telemetry.records, engine.telemetry.applied):
        assert kept.maxlen == RECORDED
    engine.ask("probe", AllReduce(torch.ones(1)))()
    assert [record.bucket for record in engine.telemetry.records] == ["probe"]
    engine.transport.close()


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "exdyna(schedule='local')"])
def test_a_default_profile_has_ranges_of_exchanges(scheme: str) -> None:
    def work() -> set[str]:
        model = torch.nn.Linear(300, 300)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = gradtide.replicate(model, optimizer, scheme)
        with torch.profiler.profile(acc_events=True) as profile:  # 2.11 warns
            for _ in range(4):
                model(torch.randn(2, 300)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        sync.remove()
        return {e.name for e in profile.events() if e.name.startswith("gradtide::")}

    for found in run_ranks(2, work):
        kinds = {name.rpartition("::")[2] for name in found}
        deferred = {"apply"} if scheme == "dear" else set()
        assert {"launch", "wait"} | deferred <= kinds
