"""What ranks leave for each other in the store, and who waits for whom there."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn

import gradtide
from gradtide.core.ops import Group
from gradtide.core.transport import Progress
from gradtide.transport import connect
from gradtide.transport.fault import FailureReporter, Position


def reporter(store: Any, rank: int, gone: Callable[[int], bool]) -> FailureReporter:
    return FailureReporter(store, Group(rank, 3), Progress(), gone, 0)


def test_who_hung_up_and_still_looks_is_waited_for() -> None:
    """Its door is closed, but the store it reads may be in the rank that would end."""
    store = dist.HashStore()
    host = reporter(store, 0, lambda _: True)
    peer = reporter(store, 1, lambda _: False)
    peer.fail(None)
    begin = time.monotonic()
    host.await_known(0.3)
    assert time.monotonic() - begin >= 0.3
    peer.fail(None, looked=True)
    begin = time.monotonic()
    host.await_known(10)
    assert time.monotonic() - begin < 5


def test_who_is_gone_without_a_word_is_not_waited_for() -> None:
    begin = time.monotonic()
    reporter(dist.HashStore(), 0, lambda _: True).await_known(10)
    assert time.monotonic() - begin < 5


def test_who_ended_is_named_though_another_has_yet_to_notice() -> None:
    store = dist.HashStore()  # rank 0 hears of it when the others have hung up
    where = Position(2, 7, "its program has ended", final=True, error="Broken: no")
    reporter(store, 2, lambda _: False).leave("ended", where.write())
    own = reporter(store, 1, lambda _: False)
    text = own.explain("Mean", RuntimeError("Connection closed by peer"), 0)
    assert "rank 2 took 2 steps and its program has ended by Broken" in text


@pytest.mark.parametrize(
    ("item", "left", "cut_off"), [(7, [], True), (7, [2], False), (1, [], False)]
)
def test_who_hears_of_nobody_is_told_that_its_own_link_may_be_down(
    item: int, left: list[int], cut_off: bool
) -> None:
    """The store is on the host that was cut off: the first of the others was blamed.

    At the first item others may not have connected, and be there.
    """
    store = dist.HashStore()
    for rank in left:
        reporter(store, rank, lambda _: False).fail(None, looked=True)
    own = reporter(store, 0, lambda _: False)
    where = Position(3, item, "is at work", item=item)
    text = own.explain("Mean", RuntimeError("Timed out after 5 s"), 1, where)
    assert "rank 1 does not respond" in text
    assert ("this one's own link may be down" in text) == cut_off


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ({0: 7, 1: 6}, "rank 1 is late: took 3 steps and is at work"),
        ({0: 7}, "rank 1 does not respond"),
    ],
)
def test_who_answers_is_no_rank_that_does_not_respond(
    items: dict[int, int], words: str
) -> None:
    """Where a rank was late all were blamed who waited for it inside torch."""
    store = dist.HashStore()
    heard = {r: Position(3, count, "is at work") for r, count in items.items()}
    own = Position(3, 7, "is at work", item=7)
    error = RuntimeError("Timed out after 5 s")
    text = reporter(store, 2, lambda _: False).explain(
        "comparing", error, None, own, lambda: heard
    )
    assert text.startswith(f"rank 2: comparing failed in step 1: {words}")


def test_who_failed_and_has_ended_answers_nothing_and_is_not_to_blame() -> None:
    """Others took the job's store for gone, and with it the rank that had hosted it."""
    _, (found, seconds), _ = run_ranks(3, _ask_around)
    assert found == [2]
    assert seconds < 1.5


def _ask_around() -> tuple[list[int], float]:
    transport: Any = connect(None, torch.device("cpu"))
    inquiry, rank = transport._inquiry, transport.group.rank
    if rank == 0:
        inquiry.reporter.fail(None, looked=True)
        inquiry.close("its program has ended")
    dist.barrier()
    begin, found = time.monotonic(), []
    if rank == 1:
        found = [*inquiry._ask()]
    seconds = time.monotonic() - begin
    dist.barrier()
    transport.close()
    return found, seconds


def test_who_asks_stops_where_it_is_known_why_exchanges_fail() -> None:
    """Else the error would be told when the others have been waited for."""
    own, begin = reporter(dist.HashStore(), 1, lambda _: False), time.monotonic()
    known = iter([False, False, True])
    assert own.await_words(["ended"], 20, lambda: next(known)) == [0, 2]
    assert time.monotonic() - begin < 5


def test_a_store_that_is_a_file_is_hosted_by_nobody() -> None:
    hosts = run_ranks(2, _host_of_store)
    assert hosts == [None, None]


def _host_of_store() -> int | None:
    transport: Any = connect(None, torch.device("cpu"))
    host: int | None = transport._inquiry._host
    transport.close()
    return host


@pytest.mark.product
@pytest.mark.parametrize(
    "scheme", ["wfbp", "dear", "dear(wire='bf16')", "topka2a(schedule='local')"]
)
def test_threads_end_when_who_failed_lets_go_of_all(scheme: str) -> None:
    """An error that a thread knew had frames, and in these were model and optimizer."""
    told = run_ranks(2, _let_go, scheme)
    assert told == [("CommunicationError", []), ("", [])]


def _let_go(scheme: str) -> tuple[str, list[str]]:
    error = _train_until_alone(scheme)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any("gradtide" in name for name in _names()):
        gc.collect()
        time.sleep(0.02)
    return error, [name for name in _names() if "gradtide" in name]


def _train_until_alone(scheme: str) -> str:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    sync = gradtide.replicate(model, optimizer, scheme)
    for _ in range(3 + 3 * (dist.get_rank() == 0)):
        try:
            model(torch.ones(2, 8)).square().mean().backward()
            if "dear" in scheme:  # gradients are deferred: they are in `.grad` still
                sync.clip_grad_norm_(0.1)
            optimizer.step()
        except gradtide.CommunicationError as error:
            return type(error).__name__
        optimizer.zero_grad()
    sync.remove()
    return ""


def _names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_who_hosts_the_store_tells_of_an_error_at_once() -> None:
    """It keeps the store for the others when its program ends, and not before."""
    seconds, _ = run_ranks(2, _close_after_an_error)
    assert seconds < 2


def _close_after_an_error() -> float:
    transport: Any = connect(None, torch.device("cpu"))
    transport._inquiry._host = 0  # as if it were no file
    begin = time.monotonic()
    if transport.group.rank == 0:
        transport._queue.error = gradtide.CommunicationError("all is lost")
        transport.close()
    seconds = time.monotonic() - begin
    dist.barrier()
    transport.close()
    return seconds
