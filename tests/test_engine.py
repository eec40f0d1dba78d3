"""The engine's order is a function of the program, and what holds, holds."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.bucket import Bucket, Payload
from gradtide.collectives import Dense
from gradtide.engine import RECORDED, Engine
from gradtide.ops import AllReduce, Flow, Group
from gradtide.transport import connect
from tests.ranks import run_ranks


def bucket(name: str, n: int, hold: bool, got: dict[str, Tensor]) -> Bucket:
    flat = torch.full((n,), float(dist.get_rank()))
    return Bucket(
        name, Payload(flat, [flat]), Dense(), lambda m: got.update({name: m}), hold
    )


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_issues_the_same_requests_whatever_the_clock(size: int) -> None:
    logs = run_ranks(size, _order)
    assert all(log == logs[0] for log in logs)
    scatters = [f"b{i}:ReduceScatter" for i in range(4)]
    gathers = [f"b{i}:AllGather" for i in reversed(range(4))]
    assert logs[0] == [*scatters, "probe:AllReduce", *gathers]


def _order() -> list[str]:
    size = dist.get_world_size()
    engine, got = Engine(connect(None, torch.device("cpu"))), dict[str, Tensor]()
    buckets = [bucket(f"b{i}", size * 10**i, True, got) for i in range(4)]
    nap = random.Random(dist.get_rank())
    for b in buckets:
        time.sleep(nap.random() / 50)
        engine.launch(b)
    probe = engine.ask("probe", AllReduce(torch.ones(1)))
    time.sleep(nap.random() / 20)
    assert probe().item() == size
    engine.release(reversed(buckets))
    for b in buckets:
        time.sleep(nap.random() / 50)
        engine.finish(b)
        assert got[b.name].eq((size - 1) / 2).all()
    engine.transport.close()
    return [f"{r.bucket}:{r.request}" for r in engine.records]


def test_a_held_bucket_shows_its_part_and_takes_changes() -> None:
    run_ranks(2, _held)


def _held() -> None:
    engine, got = Engine(connect(None, torch.device("cpu"))), dict[str, Tensor]()
    held, dropped = bucket("a", 6, True, got), bucket("b", 6, True, got)
    engine.launch(held)
    engine.launch(dropped)
    part, mean = engine.held(held)
    assert mean is None
    assert part is not None
    assert part.tolist() == [0.5] * 3
    part.mul_(4)
    engine.drop(dropped)
    with pytest.raises(AssertionError, match="release it first"):
        engine.finish(held)
    engine.release([held])
    engine.finish(held)
    assert got["a"].tolist() == [2.0] * 6
    assert "b" not in got
    assert not engine.flying
    engine.transport.close()


@dataclass(frozen=True)
class NoCut:
    """An algorithm without a second half."""

    def reduce(self, load: Payload, group: Group) -> Flow:
        total, _ = yield AllReduce(load.flat), AllReduce(torch.zeros(1))
        total /= group.size
        return load.flat


def test_without_a_cut_the_mean_itself_is_held() -> None:
    run_ranks(2, _no_cut)


def _no_cut() -> None:
    engine, got = Engine(connect(None, torch.device("cpu"))), dict[str, Tensor]()
    b = bucket("a", 6, True, got)
    b.collective = NoCut()
    engine.launch(b)
    part, mean = engine.held(b)
    assert part is None
    assert mean is not None
    engine.release([b])
    engine.finish(b)
    assert got["a"].tolist() == [0.5] * 6
    assert engine.records[0].request == "AllReduce+AllReduce"
    assert engine.exposed_seconds > 0
    engine.clear()
    assert not engine.records
    engine.transport.close()


def test_what_is_recorded_is_bounded() -> None:
    run_ranks(1, _bounded)


def _bounded() -> None:
    engine = Engine(connect(None, torch.device("cpu")))
    for kept in (engine.records, engine.applied):
        assert kept.maxlen == RECORDED
    engine.ask("probe", AllReduce(torch.ones(1)))()
    assert [record.bucket for record in engine.records] == ["probe"]
    engine.transport.close()
