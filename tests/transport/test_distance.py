"""Ranks that are far apart ask in other ways, and get the same bits."""

from __future__ import annotations

import gc
import os
import random
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide.core.engine import Engine
from gradtide.core.ops import (
    AllGather,
    AllReduce,
    Cut,
    Flow,
    Group,
    Mean,
    ReduceScatter,
)
from gradtide.core.transport import CommunicationError, Job
from gradtide.planner.measure import measure
from gradtide.planner.network import Network
from gradtide.transport import connect, gloo, several
from gradtide.transport.comm_queue import CommQueue
from gradtide.transport.distance import Distance, distance_of, one_way
from gradtide.transport.opening import Meeting
from gradtide.transport.several import CONNECTIONS, SEVERAL, Wish, agreed, wish

AWAY = Distance(0.05, 0.05)
SCHEMES = (
    "wfbp(fusion=BySize(0.8))",  # near ranks have a ring for it
    "dear(fusion=BySize(0.8))",
    "wfbp(wire='e3m0', fusion=BySize(0.4))",
    "dear(wire='int8', fusion=BySize(0.4))",
    "topka2a(0.05, schedule='local', wire='e3m0')",
    "exdyna(0.05, schedule='local', wire='e3m0')",
    "oktopk(0.05)",
    "diloco(every=2)",
)


def test_ranks_are_as_far_as_the_hosts_that_they_are_on() -> None:
    told = [(0.0, 0.02), (0.01, 0.02), (0.0, 0.01), (0.03, 0.03)]
    assert distance_of(told) == Distance(0.02, 0.03)
    assert distance_of([(0.0, 0.0)] * 3) == Distance()
    assert Distance(0.02, 0.03).far
    assert not Distance(1e-4, 1e-3).far


def test_a_ring_is_left_where_its_hops_take_longer_than_the_bytes() -> None:
    assert AWAY.direct_pays(8 << 20, 4)
    assert not AWAY.direct_pays(16 << 20, 4)  # more than what routers hold
    assert not AWAY.direct_pays(0, 2)  # one hop is a ring
    assert not Distance(2e-5, 2e-5).direct_pays(1 << 20, 4)
    assert not Distance().direct_pays(1, 8)


def test_the_system_tells_how_far_a_rank_is() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as calling,
    ):
        assert 0 < one_way(calling) < 0.01
    one, other = socket.socketpair()
    with one, other:
        assert one_way(one) == 0


def be_far() -> None:
    """Have the ranks of this process be told that they are far apart."""
    gloo.distance_of = lambda told: AWAY  # type: ignore[assignment]


def be_several() -> None:
    """Have three connections of TCP to each other rank."""
    os.environ[CONNECTIONS] = "3"
    listen = Meeting._listen
    outside: Any = lambda own, word: listen(own, word)._replace(name="")  # noqa: E731
    Meeting._listen = outside  # type: ignore[method-assign]


@pytest.mark.product(each=12)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_far_ranks_train_to_the_same_bits(scheme: str) -> None:
    near, *_ = run_ranks(4, _train, scheme, False)
    for far in run_ranks(4, _train, scheme, True):
        assert far == near


@pytest.mark.product(each=6)
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_with_several_connections_train_to_the_same_bits(
    scheme: str, far: bool
) -> None:
    near, *_ = run_ranks(4, _train, scheme, False)
    for found in run_ranks(4, _train_by_several, scheme, far):
        assert found == near


def _train_by_several(scheme: str, far: bool) -> list[list[float]]:
    be_several()
    return _train(scheme, far)


def test_ranks_agree_on_how_many_connections_there_are() -> None:
    wishes = Wish(1, 8), Wish(1, 1), Wish(2, 2, 5)
    assert agreed(wishes, far=True) == 5
    assert agreed(wishes, far=False) == 2


def test_there_are_several_where_bbr_is_not_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CONNECTIONS, raising=False)
    for allowed, expected in ((True, 1), (False, SEVERAL)):
        monkeypatch.setattr(several, "governed", lambda allowed=allowed: allowed)
        assert wish(4)[:2] == (1, expected)
        assert wish(100)[:2] == (1, 1)
    monkeypatch.setattr(several, "left", lambda: 40)
    assert wish(4).room == 5
    monkeypatch.setenv(CONNECTIONS, "12")
    assert wish(4)[:2] == (12, 12)


def test_a_number_of_connections_that_is_none_is_told_on_every_rank() -> None:
    for told in run_ranks(2, _wrong_number):
        assert "GRADTIDE_CONNECTIONS='many' is no number of connections: 1 to" in told


def _wrong_number() -> str:
    if dist.get_rank() == 1:
        os.environ[CONNECTIONS] = "many"
    with pytest.raises(ValueError, match="rank 1 cannot connect") as caught:
        connect(None, torch.device("cpu"))
    return str(caught.value)


def test_connections_that_cannot_be_made_are_told_on_every_rank() -> None:
    for rank, told in enumerate(run_ranks(2, _no_more_connections)):
        assert f"rank {rank}: connecting failed" in told
        assert f"rank {1 - rank}" in told


def _no_more_connections() -> str:
    be_several()
    call = Meeting.call

    def first_alone(own: Meeting, peer: int, lane: int) -> socket.socket:
        if lane:
            raise OSError("Too many open files")
        return call(own, peer, lane)

    Meeting.call = first_alone  # type: ignore[method-assign]
    with pytest.raises(CommunicationError) as caught:
        connect(None, torch.device("cpu"))
    return str(caught.value)


def _train(scheme: str, far: bool) -> list[list[float]]:
    if far:
        be_far()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    sync = gradtide.replicate(model, optimizer, scheme)
    rng = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        time.sleep(random.random() / 100)
        model(torch.randn(4, 300, generator=rng)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.flush()
    found = [p.flatten()[::97].tolist() for p in model.parameters()]
    sync.remove()
    return found


def test_a_transport_of_far_ranks_is_collected() -> None:
    assert run_ranks(2, _collected) == [True, True]


def _collected() -> bool:
    be_far()
    transport = connect(None, torch.device("cpu"))
    known = weakref.ref(transport)
    dist.barrier()
    del transport
    gc.collect()
    return known() is None


@pytest.mark.slow
def test_a_measured_network_says_how_far_its_ranks_are() -> None:
    """So that the planner asks as these ranks do."""
    for network in run_ranks(2, _measured):
        assert network.delay == AWAY.hop
        assert network.distance.far


def _measured() -> Network:
    be_far()
    transport = connect(None, torch.device("cpu"))
    network = measure(transport, 0.1, torch.device("cpu"))
    transport.close()
    return network


def test_items_go_on_while_others_wait_and_keep_their_order() -> None:
    run_ranks(3, _go_on, True)
    run_ranks(3, _go_on, False)


def _go_on(far: bool) -> None:
    """Flows of several requests, under way at once, and begun sooner on one rank."""
    if far:
        be_far()
    engine = Engine(connect(None, torch.device("cpu")))
    rank, size = engine.group
    nap = random.Random(rank)
    seen: list[int] = []

    def flow(i: int) -> Flow:
        x = torch.full((size * (i % 7 + 1) * 9000,), float(i))
        part = yield ReduceScatter(x)
        count = yield AllReduce(torch.ones(1))
        assert count.item() == size
        seen.append(i)
        whole: Tensor = yield AllGather(part, into=x)
        return whole

    flights: list[Any] = []
    for i in range(120):
        flights.append(engine.launch(f"b{i % 5}", flow(i)))
        if i % 20 == 7 * rank:
            time.sleep(nap.random() / 20)
            engine.wait(flights[-1])
    for i, flight in enumerate(flights):
        assert engine.finish(flight).eq(size * float(i)).all()
    engine.transport.close()
    assert sorted(seen) == [*range(120)]
    if not far:
        assert seen == sorted(seen)


def test_what_has_begun_goes_on_while_another_waits() -> None:
    """And no more has begun at a time than the queue lets."""
    log: list[str] = []
    queue = CommQueue("a queue of test_distance", 3)
    queue.suit_delay(lambda pending: pending == "here", lambda: None, 3)

    def note(*words: str) -> Callable[[], None]:
        return lambda: log.append(" ".join(words))

    def advance(name: str) -> Callable[[Callable[[Any], bool]], None]:
        return lambda here: log.append(f"{name} {here('here')} {here('not yet')}")

    def wait() -> None:
        while queue.submitted < 4:
            time.sleep(0.001)
        for _ in range(3):
            queue.begin_next()
        log.append("a over")

    def job(name: str, work: Callable[[], None]) -> Job:
        return Job(note(name, "begins"), work, name=name, advance=advance(name))

    jobs = [job("a", wait), *(job(name, note(name, "over")) for name in "bac")]
    for ticket in [queue.submit(each) for each in jobs]:
        ticket.join()
    queue.close()
    goes_on = ["b begins", "b True False", "a begins", "b True False", "a True False"]
    rest = ["a over", "b over", "a over", "c begins", "c over"]
    assert log == ["a begins", *goes_on, *rest]


def test_a_flow_goes_on_as_far_as_its_answers_are_here() -> None:
    asked: list[Any] = []
    jobs: list[Job] = []

    class Fake:
        group, payload_bytes = Group(0, 2), 0
        submit = staticmethod(jobs.append)

        def issue(self, op: Any) -> Any:
            asked.append(op)
            return op

        def wait(self, op: Any) -> Tensor:
            return torch.tensor([len(asked)])

    def flow() -> Flow:
        first = yield AllReduce(torch.ones(1))
        second: Tensor = yield AllReduce(first)
        return second

    flight = Engine(Fake()).launch("x", flow())  # type: ignore[arg-type]
    (job,) = jobs
    job.begin()
    job.advance(lambda op: False)
    assert len(asked) == 1
    job.advance(lambda op: op is asked[0])
    assert len(asked) == 2
    assert flight.mean is None
    job.advance(lambda op: True)
    assert flight.mean.item() == 2
    job.work()
    assert len(asked) == 2


def _in_turn(in_turn: bool) -> list[bool]:
    """What a flow has seen of an earlier one, which waits for another rank."""
    be_far()
    engine = Engine(connect(None, torch.device("cpu")))
    done, seen = list[bool](), list[bool]()

    def first() -> Flow:
        answer = yield Mean(torch.ones(engine.group.size))
        done.append(True)
        return answer

    def second() -> Flow:
        yield Cut(torch.zeros(1))
        seen.append(bool(done))
        return (yield Mean(torch.ones(engine.group.size)))

    if engine.group.rank:
        time.sleep(0.4)
    flights = [
        engine.launch("first", first()),
        engine.launch("second", second(), in_turn=in_turn),
    ]
    for flight in flights:
        engine.finish(flight)
    engine.transport.close()
    return seen


def test_what_goes_on_in_turn_sees_what_earlier_ones_have_done() -> None:
    """Else one far rank would invert factors before their sum is there."""
    assert [seen for (seen,) in run_ranks(2, _in_turn, True)] == [True, True]
    early, _ = run_ranks(2, _in_turn, False)
    assert early == [False]
