"""NCCL is asked for what it can do, by the right thread; on CPUs, and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.test_transport import ask, nothing, requests, row, used_rows
from tests.transport.as_nccl import Stream, as_nccl
from torch import nn

import gradtide
from gradtide.core.engine import Engine
from gradtide.core.levels import levels_of
from gradtide.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Broadcast,
    Mean,
    Op,
    ReduceScatter,
    Swap,
)
from gradtide.core.transport import CommunicationError, Job
from gradtide.scheme import as_scheme
from gradtide.testing import answer
from gradtide.transport import connect, nccl
from gradtide.transport.nccl import NcclTransport

pytestmark = pytest.mark.filterwarnings("ignore:.* has run for minutes")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def transport_on(device: torch.device) -> NcclTransport:
    """Links for what is elsewhere, and requests over a group of Gloo's as NCCL's."""
    control: Any = connect(None, CPU)
    return NcclTransport(dist.new_group(backend="gloo"), control, device)


def submitted(transport: Any, op: Op) -> Any:
    found: list[Any] = []
    transport.submit(Job(nothing, lambda: found.append(ask(transport, op)))).join()
    return found[0]


def odd(rank: int, size: int) -> list[Op]:
    """What the other transports take, and NCCL does not."""
    own, ones = row(rank, 3), [1] * size
    table = row(rank, 6 * size).view(6, size).t()
    waves = torch.complex(row(rank, 4 * size), row(rank + 9, 4 * size))
    uneven = [r + 1 for r in range(size)]
    return [
        AllToAll(own.expand(size, 3), ones, ones),
        AllToAll(table.clone(), ones, ones),
        Swap(table.clone(), size - 1 - rank),
        AllReduce(waves.clone()),
        Mean(waves.clone()),
        ReduceScatter(waves.clone(), mean=True),
        ReduceScatter(waves[: sum(uneven)].clone(), uneven),
        AllGather(waves[:4].clone()),
        AllGather(waves[: rank + 1].clone(), uneven),
        AllGather(waves[:4].clone(), into=torch.zeros_like(waves)),
        AllToAll(waves.clone().view(size, 4), ones, ones),
        Swap(waves.clone(), size - 1 - rank),
        Broadcast(waves.clone(), size - 1),
    ]


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("asked", [requests, odd])
def test_answers(size: int, asked: Callable[[int, int], list[Op]]) -> None:
    run_ranks(size, _answers, asked)


def _answers(asked: Callable[[int, int], list[Op]]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with as_nccl():
        transport = transport_on(CPU)
        some_ranks = [*range(size)]
        if "sort_ranks" in signature(dist.new_group).parameters:
            some_ranks.reverse()  # older ones keep no other order
        for scope in (range(size), some_ranks):
            everybodys = [asked(r, size) for r in range(size)]
            for i, mine in enumerate(asked(scope.index(rank), size)):
                some = scope != range(size)
                found = submitted(transport, Among(mine, scope) if some else mine)
                expected = answer([ops[i] for ops in everybodys])[scope.index(rank)]
                torch.testing.assert_close(found, expected, msg=f"request {i}: {mine}")
        transport.close()


def test_what_matters_of_rows_arrives() -> None:
    run_ranks(3, _used_rows)


def _used_rows() -> None:
    with as_nccl():
        used_rows(lambda _, device: transport_on(device))


RECIPES = (
    "wfbp",
    "wfbp(wire='bf16', lossless=True)",
    "dear(wire='bf16')",
    "wfbp(wire='e3m0')",
    "topka2a(0.1)",
    "topk(0.1, schedule='dear')",
    "oktopk(0.1)",
    "gtopk(0.1)",
    "exdyna(0.1)",
    "demo(64)",
    "powersgd(2)",
    "pad_kfac(factor_every=1, inverse_every=2)",
)


@pytest.mark.product
@pytest.mark.parametrize("levels", [None, 2])
def test_recipes_ask_for_nothing_else(levels: int | None) -> None:
    run_ranks(2 if levels is None else 4, train, levels, transport_on)


def train(levels: int | None, made: Callable[[torch.device], Any]) -> None:
    """Over NCCL as it is on CPUs, all ranks come to the same weights."""
    with as_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradtide.session, "connect", lambda pg, device: made(CPU))
        for recipe in RECIPES:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40))
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            scheme = replace(as_scheme(recipe), levels=levels)
            sync = gradtide.replicate(model, optimizer, scheme, check_every=1)
            for step in range(4):
                torch.manual_seed(dist.get_rank() + 10 * step)
                model(torch.randn(8, 40)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            sync.remove()
            everybody = [torch.empty(60, 40) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, model[0].weight.detach())
            assert all(one.equal(everybody[0]) for one in everybody), recipe


def test_streams_are_those_of_the_parameters_device() -> None:
    run_ranks(1, _streams)


def _streams() -> None:
    other = torch.device("cuda", 1)  # which is not the current one
    with as_nccl():
        transport = transport_on(other)
        transport.submit(Job(nothing, nothing)).join()
        transport.close()
        assert Stream.devices == {other}


@pytest.mark.product(each=6)
@pytest.mark.parametrize("local", [1, 2])
def test_words_are_waited_for_where_they_are_read(local: int) -> None:
    run_ranks(2 * local, _words, local)


def _words(local: int) -> None:
    """The last rank says nothing before all others have said their words."""
    rank, size = dist.get_rank(), dist.get_world_size()
    said = torch.zeros(1)
    with as_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "meet", lambda pg, device: None)
        engine = Engine(transport_on(CUDA))
        engine.levels = levels_of(engine.group, local)
        for length in (3, 3000):  # by hosts, this takes three requests
            if rank == size - 1:
                for other in range(size - 1):
                    dist.recv(said, other)
            words = AllReduce(torch.full((length,), rank, dtype=torch.int32))
            answer = engine.ask("used", lambda words=words: words)
            if rank < size - 1:
                dist.send(said, size - 1)
            assert answer().eq(sum(range(size))).all()
            # What is asked in the middle of something is waited for there.
            assert submitted(engine.transport, words).eq(size * sum(range(size))).all()
        assert engine.transport.payload_bytes > 0
        engine.transport.close()


@contextmanager
def after_rank_1() -> Iterator[tuple[NcclTransport, list[int]]]:
    """Rank 0's transport, when rank 1 of two has closed its own; aborts are noted."""
    aborted: list[int] = []
    pg: Any = SimpleNamespace(
        rank=dist.get_rank, size=lambda: 2, abort=lambda: aborted.append(1)
    )
    with as_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "meet", lambda pg, device: None)
        control: Any = connect(None, CPU)
        transport = NcclTransport(pg, control, CUDA)
        if dist.get_rank() == 1:
            control.close()
        yield transport, aborted


def fail() -> None:
    raise dist.DistBackendError("NCCL communicator was aborted")


def exhaust() -> None:
    raise torch.OutOfMemoryError("no memory is left")


def test_nccl_is_aborted_where_words_do_not_come() -> None:
    run_ranks(2, _aborted)


def _aborted() -> None:
    with after_rank_1() as (transport, aborted):
        if dist.get_rank() == 1:
            return
        answer = Engine(transport).ask("used", AllReduce(torch.zeros(3)))
        with pytest.raises(CommunicationError, match="rank 1"):
            answer()
        assert aborted
        # Who the rank is, is told in the place of what NCCL knows.
        with pytest.raises(CommunicationError, match="rank 1"):
            transport.submit(Job(fail, nothing))
        aborted.clear()
        transport.close()
        assert aborted


def test_what_nccl_fails_with_is_told_with_the_rank_that_is_gone() -> None:
    run_ranks(2, _failed)


def _failed() -> None:
    with after_rank_1() as (transport, aborted):
        if dist.get_rank() == 1:
            return
        with pytest.raises(torch.OutOfMemoryError):
            transport.submit(Job(exhaust, nothing))
        assert not aborted
        with pytest.raises(CommunicationError, match="rank 1"):
            transport.submit(Job(fail, nothing, name="grad3"))
        assert aborted


def test_groups_of_ours_do_not_have_torch_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    with nccl.cleaning_up_only():
        assert os.environ[name] == "2"
    assert name not in os.environ
    monkeypatch.setenv(name, "1")
    with nccl.cleaning_up_only():
        assert os.environ[name] == "1"
    assert os.environ[name] == "1"
