"""The transport's answers equal the lockstep driver's, on real processes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Broadcast,
    Group,
    Mean,
    Op,
    ReduceScatter,
    Swap,
    ToHost,
    message_of,
    subgroup,
)
from gradtide.core.transport import Job
from gradtide.testing import answer
from gradtide.transport import Transport, connect, rotation
from gradtide.transport.comm_queue import CommQueue
from gradtide.transport.gloo import GlooTransport
from gradtide.transport.pieces import answer_to
from tests.ranks import run_ranks


def nothing() -> None: ...


def row(rank: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: sums are exact in every dtype and order."""
    rng = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (n,), generator=rng).to(dtype)


def requests(rank: int, size: int) -> list[Op]:
    uneven = [(3 * r + 1) % 5 for r in range(size)]
    begin = sum(uneven[:rank])
    lonely = [300_000 if r == size // 2 else 3 for r in range(size)]
    send = [(rank + r) % 3 for r in range(size)]
    long = 400_000 if size < 5 else 50_000  # of a part: several segments, for some
    into = torch.zeros(7 * size)
    into[7 * rank : 7 * rank + 7] = row(rank, 7)
    return [
        AllReduce(row(rank, 5)),
        Mean(row(rank, 4 * size)),
        Mean(row(rank, 400_003)),  # a ring, of uneven parts
        Mean(row(rank, 400_000, torch.bfloat16)),
        ReduceScatter(row(rank, 4 * size)),
        ReduceScatter(row(rank, sum(uneven)), uneven),
        ReduceScatter(row(rank, 4 * size), mean=True),
        ReduceScatter(row(rank, long * size), mean=True),
        ReduceScatter(row(rank, 4 * size, torch.bfloat16)),
        ReduceScatter(row(rank, long * size)),
        ReduceScatter(row(rank, sum(lonely)), lonely),
        AllGather(row(rank, lonely[rank]), lonely),
        AllGather(row(rank, 6).view(2, 3)),
        AllGather(row(rank, uneven[rank]), uneven),
        AllGather(into[7 * rank : 7 * rank + 7], into=into),
        AllGather(row(rank, 2), into=torch.zeros(2 * size)),
        AllGather(row(rank, sum(uneven))[begin : begin + uneven[rank]], uneven),
        AllGather(row(rank, long, torch.int64)),
        AllToAll(row(rank, 2 * sum(send)).view(-1, 2), send, send),
        AllToAll(row(rank, size, torch.bfloat16), [1] * size, [1] * size),
        AllToAll(row(rank, long * size).view(size, -1), [1] * size, [1] * size),
        Swap(row(rank, 5), size - 1 - rank),
        Broadcast(row(rank, 5), size - 1),
        ToHost(row(rank, 3)),
    ]


@pytest.mark.product(each=12)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_answers(size: int) -> None:
    run_ranks(size, _answers)


def _answers() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = connect(None, torch.device("cpu"))
    assert transport.group == Group(rank, size)
    everybodys = [requests(r, size) for r in range(size)]
    for i, mine in enumerate(requests(rank, size)):
        answers: list[Any] = []
        asking = Job(nothing, lambda a=answers, op=mine: a.append(ask(transport, op)))
        transport.submit(asking).join()
        expected = answer([ops[i] for ops in everybodys])[rank]
        name = f"request {i}: {type(mine).__name__}"
        assert torch.equal(answers[0], expected), name
        own = in_place(mine, transport.group)
        assert own is None or own.data_ptr() == answers[0].data_ptr(), name
    transport.close()


def test_what_matters_of_rows_arrives() -> None:
    """And no more than that leaves."""
    run_ranks(3, _used_rows)


def _used_rows() -> None:
    rank, left, plain = dist.get_rank(), list[int](), rotation.all_to_all

    def noted(leaving: Any, *more: Any, **named: Any) -> Any:
        left.append(sum(x.numel() for i, x in enumerate(leaving) if i != rank))
        return plain(leaving, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "all_to_all", noted)
        sent = used_rows(connect)
    assert left[-2:] == [sent, sent]


def used_rows(made: Callable[[Any, torch.device], Any]) -> int:
    """Ask for rows of which some elements matter; returns how many are sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = made(None, torch.device("cpu"))
    used = [[1, 9, 400_000][(r + i) % 3] for r in range(size) for i in range(size)]
    rows = [row(r, 400_000, torch.int64) for r in range(size)]
    own = used[size * rank : size * (rank + 1)]
    ones, others = [1] * size, [int(r != rank) for r in range(size)]
    sent = [n for r, n in enumerate(own) if r != rank]
    asked = [
        AllToAll(rows[rank].expand(size, -1), ones, ones, own),
        AllToAll(rows[rank].expand(size - 1, -1), others, others, sent),
    ]
    for i, op in enumerate(asked):
        before, found = transport.payload_bytes, []
        asking = Job(nothing, lambda a=found, op=op: a.append(ask(transport, op)))  # type: ignore[misc]
        transport.submit(asking).join()
        assert transport.payload_bytes - before == 8 * sum(sent), i
        sources = [r for r in range(size) if i == 0 or r != rank]
        for source, heard in zip(sources, found[0], strict=True):
            n = used[size * source + rank]
            assert heard[:n].equal(rows[source][:n]), (i, source)
    transport.close()
    return sum(sent)


@pytest.mark.product
@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 2), (1, 3), (4, 1)])
def test_answers_among_some_ranks(hosts: int, local: int) -> None:
    run_ranks(hosts * local, _among, local)


def _among(local: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = connect(None, torch.device("cpu"))
    host, place = divmod(rank, local)
    inside, across = range(host * local, (host + 1) * local), range(place, size, local)
    for ranks, own in ((inside, place), (across, host)):
        everybodys = [some(r, len(ranks)) for r in range(len(ranks))]
        for i, mine in enumerate(some(own, len(ranks))):
            answers: list[Any] = []
            asked = Among(mine, ranks)
            asking = Job(
                nothing, lambda a=answers, op=asked: a.append(ask(transport, op))
            )
            transport.submit(asking).join()
            expected = answer([ops[i] for ops in everybodys])[own]
            name = f"request {i}: {type(mine).__name__}"
            assert torch.equal(answers[0], expected), name
            memory = in_place(asked, transport.group)
            assert memory is None or memory.data_ptr() == answers[0].data_ptr(), name
    transport.close()


def some(rank: int, size: int) -> list[Any]:
    """All that can be asked of a part of the ranks, also at length."""
    long = [AllReduce(row(rank, 30_001)), Broadcast(row(rank, 30_000), size - 1)]
    return [op for op in requests(rank, size) if not isinstance(op, ToHost)] + long


def in_place(op: Op, group: Group) -> Tensor | None:
    """The memory of who asks that holds the answer, if one may rely on that."""
    asked: Any = message_of(op)
    if isinstance(asked, ToHost | AllToAll | Swap):
        return None
    if isinstance(asked, AllGather) and asked.into is None:
        return None
    return answer_to(asked, subgroup(op, group) if isinstance(op, Among) else group)


def ask(transport: Transport, op: Op) -> Any:
    return transport.wait(transport.issue(op))


@pytest.mark.product
@pytest.mark.parametrize("size", [2, 3, 5])
def test_payload_is_the_least_there_is(size: int) -> None:
    for sent in run_ranks(size, _payload):
        assert sent == 2 * (size - 1) * 60 * 4


def _payload() -> int:
    size = dist.get_world_size()
    transport = connect(None, torch.device("cpu"))
    x = torch.ones(60 * size)
    part = ask(transport, ReduceScatter(x))
    ask(transport, AllGather(part, into=x))
    assert x.eq(size).all()
    transport.close()
    return transport.payload_bytes


def test_a_failure_in_one_subgroup_is_not_reported_in_another() -> None:
    run_ranks(4, _disjoint)


def _disjoint() -> None:
    """Groups that do not overlap, connected a different number of times."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank, odd = dist.get_rank() // 2, dist.get_rank() % 2
    transports = []
    for _ in range(1 + odd):
        transport = connect(pairs[odd], torch.device("cpu"))
        assert isinstance(transport, GlooTransport)
        transports.append(transport)
    if not odd:
        reporter = transports[0]._inquiry.reporter
        said = reporter.explain("probe", RuntimeError("lost"), None)
        assert "all ranks noticed; see the first" in said
        said = reporter.explain("probe", RuntimeError("lost"), 1 - rank)
        assert f"all ranks noticed, rank {1 - rank} too" in said
    dist.barrier()
    if odd and rank == 0:
        for transport in transports:
            reporter = transport._inquiry.reporter
            said = reporter.explain("probe", RuntimeError("lost"), None)
            assert "rank 1 does not respond" in said
    dist.barrier()
    for transport in transports:
        transport.close()


def test_many_messages_keep_order() -> None:
    run_ranks(2, _many)


def _many() -> None:
    """Work items of several requests of changing sizes, begun sooner on one rank."""
    transport = connect(None, torch.device("cpu"))
    sums: list[Tensor] = []
    tickets = []
    for i in range(400):
        x = torch.full((2 * (i % 7 + 1),), float(i))
        begun: list[Any] = []

        def begin(b: list[Any] = begun, x: Tensor = x) -> None:
            b.append(transport.issue(ReduceScatter(x)))

        def work(b: list[Any] = begun, x: Tensor = x) -> None:
            part = transport.wait(b[0])
            ask(transport, AllReduce(torch.ones(1)))
            sums.append(ask(transport, AllGather(part, into=x)))

        tickets.append(transport.submit(Job(begin, work)))
        if i % 50 == 25 * dist.get_rank():
            tickets[-1].join()
    for ticket in tickets:
        ticket.join()
    for i, total in enumerate(sums):
        assert total.tolist() == [2.0 * i] * 2 * (i % 7 + 1)
    transport.close()


@pytest.mark.product
@pytest.mark.parametrize("size", [2, 4, 5])
def test_requests_travel_together(size: int) -> None:
    run_ranks(size, _together)


def _together() -> None:
    """Pairs of requests, both issued before the first is waited for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = connect(None, torch.device("cpu"))

    def some(rank: int) -> list[Op]:
        even, parts = [30_000] * size, [400_000 // size + r for r in range(size)]
        return [
            AllToAll(row(rank, 30_000 * size), even, even),
            ReduceScatter(row(rank, sum(parts)), parts),  # a ring
            ReduceScatter(row(rank + 1, sum(parts)), parts),
            AllReduce(row(rank, 3)),
            AllGather(row(rank, 5)),
            AllGather(row(rank, 100_000)),  # a ring
            Swap(row(rank, 9), size - 1 - rank),
        ]

    together = zip(*(some(r) for r in range(size)), strict=True)
    expected = [answer(list(ops))[rank] for ops in together]
    for chosen in itertools.product(range(len(expected)), repeat=2):
        mine: list[Any] = []

        def work(pair: list[Op], mine: list[Any]) -> None:
            pending = [transport.issue(op) for op in pair]
            mine.extend(map(transport.wait, pending))

        own = [some(rank)[i] for i in chosen]
        transport.submit(Job(nothing, partial(work, own, mine))).join()
        for i, got in zip(chosen, mine, strict=True):
            assert torch.equal(got, expected[i]), chosen
    transport.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's scheduler alone")
def test_a_queue_interrupts_nobody_and_its_owner_stays_as_it_was() -> None:
    queue = CommQueue("patient", 2)
    found: list[int] = []
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    look = Job(nothing, lambda: found.append(os.sched_getscheduler(0)))
    queue.submit(look).join()
    queue.close()
    assert found == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_lane_runs_in_order_and_stops_at_the_first_error() -> None:
    queue, ran = CommQueue("test", 2), list[int]()

    def fail() -> None:
        raise OSError("wire")

    first = queue.submit(Job(nothing, lambda: ran.append(1)))
    second = queue.submit(Job(fail, lambda: ran.append(2)))
    third = queue.submit(Job(lambda: ran.append(3), nothing))
    first.join()
    for ticket in (second, third):
        with pytest.raises(OSError, match="wire"):
            ticket.join()
    queue.close()
    assert ran == [1]


def test_the_next_work_item_begins_early_once_and_its_error_is_its_own() -> None:
    queue, ran = CommQueue("test", 2), list[str]()
    gate = threading.Event()

    def work() -> None:
        gate.wait()
        queue.begin_next()
        queue.begin_next()
        ran.append("first")

    def fail() -> None:
        ran.append("begun")
        raise OSError("wire")

    first = queue.submit(Job(nothing, work))
    second = queue.submit(Job(fail, nothing))
    gate.set()
    first.join()
    with pytest.raises(OSError, match="wire"):
        second.join()
    queue.close()
    assert ran == ["begun", "first"]


def begun(jobs: Callable[[list[str]], list[Job]]) -> list[str]:
    """What runs if the first of several items asks for others to begin."""
    queue, ran, gate = CommQueue("test", 3), list[str](), threading.Event()

    def work() -> None:
        gate.wait()
        for _ in range(4):
            queue.begin_next()
        ran.append("worked")

    tickets = [queue.submit(job) for job in (Job(nothing, work), *jobs(ran))]
    gate.set()
    for ticket in tickets:
        ticket.join()
    queue.close()
    return ran


def test_as_many_items_begin_early_as_may_be_under_way() -> None:
    def jobs(ran: list[str]) -> list[Job]:
        return [Job(partial(ran.append, name), nothing) for name in ("a", "b", "c")]

    assert begun(jobs) == ["a", "b", "worked", "c"]


def test_nothing_begins_ahead_of_what_is_settled() -> None:
    """It looks at where other items are: at their cuts, and not beyond."""

    def jobs(ran: list[str]) -> list[Job]:
        settled = Job(nothing, lambda: ran.append("settled"), settled=True)
        return [settled, Job(lambda: ran.append("begun"), nothing)]

    assert begun(jobs) == ["worked", "settled", "begun"]


def test_nothing_begins_early_that_a_device_has_yet_to_fill() -> None:
    looks = iter([False, False, True, True])

    def jobs(ran: list[str]) -> list[Job]:
        begin = [partial(ran.append, name) for name in ("a", "b")]
        return [
            Job(begin[0], nothing, filled=lambda: next(looks)),
            Job(begin[1], nothing, filled=lambda: False),
        ]

    assert begun(jobs) == ["a", "worked", "b"]


def test_lanes_run_beside_each_other_each_in_order() -> None:
    """Before and after of items go on while another item works; settled ones wait."""
    queue, ran = CommQueue("test", 2), list[str]()
    prepared, told, settled = (threading.Event() for _ in range(3))

    def noted(name: str, *, says: Any = None, waits: Any = None) -> Callable[[], None]:
        def run() -> None:
            assert waits is None or waits.wait(20)
            ran.append(name)
            if says is not None:
                says.set()

        return run

    first = Job(
        nothing,
        noted("work 1", waits=prepared),  # of the next job, meanwhile
        before=noted("before 1"),
        after=noted("after 1", says=told),
    )
    second = Job(
        nothing,
        noted("work 2", waits=told),
        before=noted("before 2", says=prepared),
        after=noted("after 2", waits=settled),
    )
    third = Job(nothing, noted("last"), settled=True)
    fourth = Job(nothing, nothing, before=noted("before 4", says=settled))
    _, _, last, _ = map(queue.submit, (first, second, third, fourth))
    last.join()
    assert queue.close()
    places = {name: i for i, name in enumerate(ran)}
    for earlier, later in [
        ("before 1", "before 2"),
        ("before 2", "work 1"),
        ("work 1", "after 1"),
        ("after 1", "work 2"),
        ("before 4", "after 2"),
        ("after 2", "last"),
    ]:
        assert places[earlier] < places[later], ran


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_error_in_a_lane_ends_the_queue(where: str) -> None:
    queue, ran = CommQueue("test", 2), list[int]()

    def fail() -> None:
        raise OSError("wire")

    lanes: dict[str, Any] = {where: fail}
    first = queue.submit(Job(nothing, lambda: ran.append(1), **lanes))
    with pytest.raises(OSError, match="wire"):
        first.join()
    lanes = {"after": lambda: ran.append(3)}
    second = queue.submit(Job(nothing, lambda: ran.append(2), **lanes))
    with pytest.raises(OSError, match="wire"):
        second.join()
    assert queue.close()
    assert ran == ([1] if where == "after" else [])
