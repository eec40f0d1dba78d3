"""A rank whose process has ended is known by its door; one that is late is not."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradtide.core.ops import Group
from gradtide.transport import opening
from gradtide.transport.doors import Door, Presence
from gradtide.transport.opening import Meeting

LIMIT = 5.0


def within(true: Callable[[], bool], seconds: float = LIMIT) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def listen(pipe: Any) -> None:
    """A process with a door, at which it takes nobody in."""
    meeting = Meeting(Group(1, 2), LIMIT)
    pipe.send(meeting.door)
    time.sleep(60)
    meeting.close()


@pytest.fixture
def other() -> Iterator[tuple[Door, mp.process.BaseProcess]]:
    fork = mp.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=listen, args=(there,))
    process.start()
    yield here.recv(), process
    process.kill()
    process.join()


@pytest.mark.parametrize("inside", [True, False])
def test_a_process_that_is_killed_is_gone_and_one_that_is_stopped_is_not(
    inside: bool, other: tuple[Door, mp.process.BaseProcess]
) -> None:
    door, process = other
    there = Presence()
    there.doors = [door, door if inside else door._replace(name="")]
    assert not there.gone(1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert not within(lambda: there.closed(1), 0.5)
    process.kill()
    process.join()
    assert within(lambda: there.gone(1))
    there.close()


def test_who_sends_silent_callers_away_is_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "WORD", 0.1)
    meeting, there = Meeting(Group(0, 2), 1.5), Presence()
    there.doors = [meeting.door]
    assert not there.gone(0)
    with pytest.raises(TimeoutError):
        meeting.answer(1, 0)  # meanwhile it takes calls
    assert not within(lambda: there.closed(0), 0.3)
    meeting.close()
    assert within(lambda: there.gone(0))
    there.close()


def test_a_door_by_the_network_that_was_never_open_may_be_a_firewalls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    there = Presence()
    there._is_near = lambda _: False  # type: ignore[method-assign]
    there.doors = [Door("127.0.0.1", port, "", b"")]
    assert within(lambda: there.closed(0))
    assert not there.gone(0)


def test_strangers_that_fill_a_door_hide_no_death() -> None:
    """Who knocks comes through no longer; a call that did has told enough."""
    server = socket.create_server(("127.0.0.1", 0), backlog=1)
    port = server.getsockname()[1]
    strangers = [socket.socket() for _ in range(8)]
    for stranger in strangers:
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", port))
    there = Presence()
    there._is_near = lambda _: False  # type: ignore[method-assign]
    there.doors = [Door("127.0.0.1", port, "", b"")]
    assert not within(lambda: there.closed(0), 0.3)
    server.close()
    assert within(lambda: there.closed(0))
    assert not there.gone(0)
    there.reached(0)
    assert there.gone(0)
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_waits_for_a_call_learns_that_none_will_come() -> None:
    meetings = [Meeting(Group(rank, 2), 60.0) for rank in range(2)]
    for meeting in meetings:
        meeting.doors = [each.door for each in meetings]
    meetings[0].close()
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="listens no longer"):
        meetings[1].answer(0, 0)
    assert time.monotonic() - begin < LIMIT
    meetings[1].close()
