"""Copies, streams and threads are ordered: on a pretended device far behind the host.

And on a GPU, if there is one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.test_transport import requests, row
from tests.transport.slow_device import Device, slow_device
from tests.transport.test_nccl import odd, submitted
from torch import Tensor

from gradtide.core.engine import Engine
from gradtide.core.levels import Levels
from gradtide.core.ops import (
    AllGather,
    Cut,
    Flow,
    Handover,
    Mean,
    Op,
    ReduceScatter,
    ToHost,
)
from gradtide.core.transport import Job
from gradtide.testing import answer
from gradtide.transport import connect, pieces, staged
from gradtide.transport.staged import Pinned, StagedTransport

pytestmark = pytest.mark.filterwarnings("ignore:.* has run for minutes")
CPU = torch.device("cpu")
GARBAGE = 77


def asked(rank: int, size: int) -> list[Op]:
    every = [*requests(rank, size), *odd(rank, size)]
    return [op for op in every if not isinstance(op, ToHost)]


def filled_late(op: Any, device: Device) -> Any:
    """The same request, of memory that the device has yet to fill."""
    into: Tensor | None = getattr(op, "into", None)
    known: Tensor = op.tensor.clone()
    if 0 in op.tensor.stride():  # many places that are one in memory
        return op
    if into is not None:
        into.fill_(GARBAGE)
    if into is None or op.tensor.eq(known).all():  # no part of that
        op = replace(op, tensor=known.clone())
    late: Tensor = op.tensor
    late.fill_(GARBAGE)
    device.default.put(lambda: late.copy_(known))
    return op


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers(size: int) -> None:
    run_ranks(size, _answers)


def _answers() -> None:
    """All are asked before any is waited for, and used up as soon as they are there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everybodys = [asked(r, size) for r in range(size)]
    with slow_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "COLUMNS", 1 << 17)  # several, for some
        transport = StagedTransport(connect(None, CPU), CPU)
        under_way: list[tuple[Any, list[Any], Tensor]] = []
        device.default.put(lambda: time.sleep(0.5))
        for op in asked(rank, size):
            pending: list[Any] = []
            found: list[Any] = []
            late = filled_late(op, device)

            def begin(late: Op = late, pending: list[Any] = pending) -> None:
                pending.append(transport.issue(late))

            def work(pending: list[Any] = pending, found: list[Any] = found) -> None:
                found.append(transport.wait(pending.pop()))

            under_way.append((transport.submit(Job(begin, work)), found, late.tensor))
        results: list[Tensor] = []
        for ticket, found, used in under_way:
            ticket.join()

            def take(found: list[Any] = found, used: Tensor = used) -> None:
                results.append(found[0].clone())
                if 0 not in used.stride():
                    used.fill_(GARBAGE)

            device.default.put(take)
        device.default.record_event().synchronize()
        for i, result in enumerate(results):
            expected = answer([ops[i] for ops in everybodys])[rank]
            torch.testing.assert_close(result, expected, msg=f"request {i}")
        assert len(set(device.set_by)) == len(device.set_by)
        assert all(name.startswith("gradtide") for name in device.set_by)
        transport.close()


def test_columns_are_added_up_as_the_whole_is() -> None:
    run_ranks(3, _bits)


def _bits() -> None:
    host: Any = connect(None, CPU)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(3 * 70_000)
    with slow_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "COLUMNS", 1 << 17)
        transport = StagedTransport(host, CPU)
        for op in (Mean, partial(ReduceScatter, mean=True)):
            found = [submitted(one, op(x.clone())) for one in (host, transport)]
            device.default.record_event().synchronize()
            assert found[0].equal(found[1])
    host.close()


def test_lanes_work_on_one_stream() -> None:
    run_ranks(4, _lanes)


def _lanes() -> None:
    rank, size, count = dist.get_rank(), dist.get_world_size(), 5
    rows = [[row(r + size * i, 40_000) for r in range(size)] for i in range(count)]
    with slow_device() as device:
        engine = Engine(StagedTransport(connect(None, CPU), CPU))
        levels = Levels(engine.group, 2)
        flats = [filled_late(Mean(own[rank]), device).tensor for own in rows]
        flights = [
            engine.launch(f"b{i}", _by_parts(flat, levels), i < 3, hands_over=True)
            for i, flat in enumerate(flats)
        ]
        for flight in flights[:3]:
            engine.release(flight)
        results: list[Tensor] = []
        for flight in flights:
            engine.finish(flight)
            device.default.put(lambda x=flight.mean: results.append(x.clone()))
        device.default.record_event().synchronize()
        for own, result in zip(rows, results, strict=True):
            assert result.equal(torch.stack(own).sum(0) / size)
        assert len(device.set_by) == len(set(device.set_by)) == 3
        assert device.current_stream() is device.default
        engine.transport.close()


def _by_parts(x: Tensor, levels: Levels) -> Flow:
    part = yield levels.inside(ReduceScatter(x, mean=True))
    yield Handover()
    yield levels.across(Mean(part))
    yield Cut(part)
    yield Handover()
    return (yield levels.inside(AllGather(part, into=x)))


def test_pinned_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def pin(nbytes: int) -> Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(staged, "pin", pin)
    pinned = Pinned()
    for _ in range(3):
        under_way = [pinned.take(nbytes) for nbytes in (20, 100, 50)]
        assert len({x.data_ptr() for x in under_way}) == 3
        for memory in under_way:
            pinned.give_back(memory)
    assert made == [20, 100, 50]
    longest = pinned.take(200)  # in the place of the one of 100
    assert len(pinned.take(40)) == 50
    pinned.give_back(longest)
    assert len(pinned.take(90)) == 200
    assert made == [20, 100, 50, 200]
