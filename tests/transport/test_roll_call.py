"""All are there before anything is made; who never comes is named, who is late is not.

Two helpers of the tests of inquiries run ranks that end as programs do.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.test_inquiry import LIMIT, run_to_the_end
from torch import nn

import gradtide
from gradtide.core.ops import Group
from gradtide.transport import connect, descriptors, roll_call
from gradtide.transport.answering import Answering
from gradtide.transport.doors import Door
from gradtide.transport.fault import GONE, Failure, Position, part_of
from gradtide.transport.hosts import Whereabouts
from gradtide.transport.opening import Meeting
from gradtide.transport.roll_call import Word

pytestmark = pytest.mark.waits


def link() -> gradtide.Replica:
    model = nn.Linear(4, 2)
    return gradtide.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.product
@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("when", ["before", "connecting"])
def test_a_rank_that_dies_before_it_is_linked_is_named(
    tmp_path: Path, when: str, dead: int
) -> None:
    connecting: Any = sys.modules["gradtide.transport.connect"]

    def work(rank: int) -> None:
        def end(*_: Any) -> None:
            (tmp_path / "stopped").write_text(str(time.monotonic()))
            os._exit(9)

        if rank == dead and when == "before":
            end()
        if rank == dead:
            connecting._sibling = end
        link()

    seconds, told = run_to_the_end(tmp_path, 3, work)
    assert seconds < LIMIT
    for rank in {0, 1, 2} - {dead}:
        assert f"rank {dead} is gone" in told[rank], told


def test_who_failed_before_it_came_has_said_why(tmp_path: Path) -> None:
    """Rank 1 is at the next call already when rank 0 dies in what rank 2 waits for."""

    def work(rank: int) -> None:
        sync = link()
        if rank == 0:
            (tmp_path / "stopped").write_text(str(time.monotonic()))
            os._exit(9)
        if rank == 2:
            sync.model(torch.ones(1, 4)).sum().backward()
            sync.flush()
        link()

    seconds, told = run_to_the_end(tmp_path, 3, work)
    assert seconds < LIMIT
    assert "connecting failed: rank 0 is gone" in told[1], told
    assert "rank 0 is gone" in told[2], told


def test_of_an_earlier_failure_only_who_is_gone_counts() -> None:
    """What else ranks fell out over then, and have mended, is not why one dies now."""
    store, where = dist.HashStore(), Position(3, 7, "is at work")
    call, before = object.__new__(roll_call.RollCall), part_of(store, "before")
    call._store = Answering(part_of(store, "now"), 5.0)
    call._last, call._size = "before", 3
    before.set("failed/0", Failure(where, "ranks ask for different things").write())
    assert call._learnt_before() == ""
    before.set("failed/1", Failure(where, f"rank 2 {GONE}").write())
    assert call._learnt_before() == f"rank 2 {GONE}"


@pytest.mark.parametrize("size", [1, 3])
def test_a_store_that_nobody_hosts_any_more_is_abandoned(size: int) -> None:
    """Whoever asks torch for another connection waits for the group's timeout."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    mine = dist.PrefixStore("mine", dist.TCPStore("127.0.0.1", store.port, 1, False))
    for _ in range(size - 1):
        mine = dist.PrefixStore("mine", mine)
    assert not roll_call.is_abandoned(mine)
    del store
    assert roll_call.is_abandoned(mine)
    assert not roll_call.is_abandoned(dist.HashStore())


def test_a_store_that_cannot_be_reached_is_not_gone() -> None:
    """Its host was said to have died out of memory where a link was down."""
    _, told = run_ranks(2, _cannot_reach)
    assert "connecting failed: rank 0 does not respond (stalled, or not to" in told


def _cannot_reach() -> str:
    told = ""
    if dist.get_rank() == 1:
        error = dist.DistNetworkError("The client socket has timed out after 10000ms")
        with (
            mock.patch.object(roll_call, "RollCall", side_effect=error),
            pytest.raises(gradtide.CommunicationError) as caught,
        ):
            link()
        told = str(caught.value)
    dist.barrier()
    return told


def test_a_rank_that_comes_late_is_waited_for() -> None:
    def run() -> int:
        time.sleep(4 * (dist.get_rank() == 1))
        return link().engine.group.size

    assert run_ranks(3, run) == [3] * 3


def test_a_rank_with_too_few_descriptors_is_told_on_all() -> None:
    def run() -> str:
        before = len(os.listdir("/proc/self/fd"))
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + 8, before + 8))
        with pytest.raises(ValueError, match="file descriptors") as caught:
            link()
        return str(caught.value)

    for told in run_ranks(2, run):
        assert "rank 1 cannot connect" in told
        assert "takes up to 21" in told
        assert "ulimit -n" in told


def test_the_limit_of_descriptors_is_raised_where_that_will_do() -> None:
    def run() -> int:
        taken = len(os.listdir("/proc/self/fd"))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 8, hard))
        return link().engine.group.size

    assert run_ranks(2, run) == [2, 2]


def test_the_limit_of_descriptors_leaves_room_for_strangers() -> None:
    def run() -> int:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert descriptors.short_of(2) == ""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = descriptors.ROOM if hard == resource.RLIM_INFINITY else hard
    assert run_ranks(1, run) == [min(most, descriptors.ROOM)]


def test_what_ranks_read_of_each_other_runs_nothing(tmp_path: Path) -> None:
    place, door = (
        Whereabouts("a", None, "b"),
        Door("::1", 7, "\0name", bytes(range(32))),
    )
    word = Word(place, door, "cpu", "")
    assert Word.read(word.write()) == word
    made = tmp_path / "made"

    class Trap:
        def __reduce__(self) -> Any:
            return open, (str(made), "w")

    for said in (pickle.dumps(Trap()), pickle.dumps(Trap()).hex().encode()):
        with pytest.raises(json.JSONDecodeError):
            Word.read(said.decode("latin1"))
    assert not made.exists()


def places(*networks: str) -> list[Whereabouts]:
    return [Whereabouts(name, None, name) for name in networks]


def test_ranks_that_reach_only_themselves_are_refused() -> None:
    inside, outside = (Door(at, 1, "", b"") for at in ("127.0.1.1", "10.0.0.1"))
    roll_call.refuse_blind(places("a", "a"), [inside, inside])
    roll_call.refuse_blind(places("a", "b"), [inside, outside])
    words = r"rank 0 and rank 2 .* 127\.0\.1\.1.*GLOO_SOCKET_IFNAME"
    with pytest.raises(ValueError, match=words):
        roll_call.refuse_blind(places("a", "a", "b"), [inside, outside, inside])


def test_ranks_on_devices_of_other_kinds_are_refused_on_every_rank() -> None:
    def run() -> None:
        device = torch.device("cuda" if dist.get_rank() == 2 else "cpu")
        words = "rank 0 has its parameters on cpu, rank 2 on cuda: move the model"
        with pytest.raises(ValueError, match=words):
            connect(None, device)

    run_ranks(3, run)


@pytest.mark.parametrize(
    ("addresses", "caller"),
    [
        (("10.0.0.1", "10.0.0.2"), 0),
        (("10.0.0.1", "127.0.0.1"), 1),  # the lower one would call itself
        (("127.0.0.1", "10.0.0.2"), 0),
    ],
)
def test_who_can_be_reached_is_called(addresses: tuple[str, str], caller: int) -> None:
    for rank in range(2):
        meeting = Meeting(Group(rank, 2), 1.0)
        doors = [Door(at, 1, "", b"") for at in addresses]
        doors[rank] = doors[rank]._replace(name="own")
        meeting.doors = doors
        assert meeting.calls(1 - rank) == (rank == caller)
        meeting.close()


@pytest.mark.slow
def test_who_is_stopped_while_all_make_a_group_is_named() -> None:
    """Torch's error names nobody, and the others named who had ended by it."""
    told = run_ranks(3, _make_together)
    for rank in (0, 2):
        start = f"rank {rank}: connecting failed: rank 1 does not respond"
        assert told[rank].startswith(start), told


def _make_together() -> str:
    meeting = Meeting(Group(dist.get_rank(), 3), 20.0)
    call = roll_call.RollCall(dist.group.WORLD, [0, 1, 2], meeting, 20.0, "cpu")
    call.answer()
    if meeting.rank == 1:
        time.sleep(3)
        return ""

    def make() -> None:
        time.sleep(1 if meeting.rank == 0 else 3)
        raise RuntimeError("Wait timeout")

    try:
        call.watch(make)
    except RuntimeError as error:
        return str(error)
    return ""
