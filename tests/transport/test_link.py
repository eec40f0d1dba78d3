"""Frames of several items' messages on one connection."""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gradtide.transport import link as streams
from gradtide.transport.link import MARK, Arrival, Asked, Coming, Link
from gradtide.transport.links import arrival, memory_of
from gradtide.transport.stream import LostError, Memory, Outstanding


@contextmanager
def pair(far: bool = False, several: int = 1) -> Iterator[tuple[Link, Link]]:
    """The two ends of connections, which hold little."""
    ends, *more = [socket.socketpair() for _ in range(several)]
    links = Link(1, ends[0]), Link(0, ends[1])
    for both in more:
        for link, end in zip(links, both, strict=True):
            link.add(end)
    for link in links:
        link.suit(far)
        for stream in link.streams:
            option = socket.SOL_SOCKET, socket.SO_SNDBUF
            stream.connection.setsockopt(*option, 1 << 16)
    try:
        yield links
    finally:
        for end in (*ends, *(end for both in more for end in both)):
            end.close()


class Leaving:
    """A message on its way, and how much of it the link has not taken."""

    def __init__(self, x: Tensor, asked: Asked) -> None:
        self.rest, self.whole = memory_of(x), x.nbytes
        self.owner = Outstanding(asked, x.nbytes, 0)

    def go(self, link: Link) -> None:
        if link.flush():
            self.rest = self.rest[
                link.send(self.rest, self.whole, self.owner, more=False) :
            ]


def ask(link: Link, into: Tensor, asked: Asked, early: bool = False) -> Outstanding:
    owner = Outstanding(asked, 0, 1)
    link.expect(Coming(link.peer, arrival(into), owner), early)
    return owner


def read_all(link: Link, order: Iterable[int]) -> None:
    for i in order:
        link.read(link.streams[i])


def test_what_comes_early_is_kept_until_it_is_asked_for() -> None:
    x, y, into = torch.arange(10.0), -torch.arange(20.0), torch.zeros(20)
    with pair() as (here, there):
        for asked, sent in (((2, 1, 0), y), ((1, 1, 0), x)):
            Leaving(sent, asked).go(here)
        first = ask(there, into[:10], (1, 1, 0))
        there.read()
        assert not first.unread
        assert into[:10].equal(x)
        assert not there.coming
        second = ask(there, into, (2, 1, 0))
        assert not second.unread
        assert into.equal(y)


def test_one_of_several_connections_that_ends_is_no_loss() -> None:
    """A rank has sent all and ends: what is left comes on the others."""
    x, into = torch.arange(5000.0), torch.zeros(5000)
    with pair(several=3) as (here, there):
        Leaving(x, (1, 1, 0)).go(here)
        owner = ask(there, into, (1, 1, 0))
        ends = [stream.connection for stream in here.streams]
        first, *others = there.streams
        ends[0].close()
        for _ in range(3):
            there.read(first)
        assert first.ended
        assert owner.unread
        for stream in others:
            there.read(stream)
        assert not owner.unread
        assert into.equal(x)
        ask(there, into, (2, 1, 0))
        for end in ends:
            end.close()
        there.read(others[0])
        with pytest.raises(LostError, match="closed by peer"):
            there.read(others[1])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_rank_is_lost_where_connections_wait_for_what_never_comes(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before the first frame left, and many were ahead of that."""
    monkeypatch.setattr(streams, "AHEAD", 20_000)
    x = torch.arange(100_000.0)
    with pair(several=3) as (here, there):
        here._sent, here.streams[0].full = 1, True
        owner = Outstanding((1, 1, 0), x.nbytes, 0)
        here.send(memory_of(x), x.nbytes, owner, more=False)
        ask(there, torch.zeros(100_000), (1, 1, 0))
        for stream in there.streams:
            there.read(stream)
        assert [stream.waits for stream in there.streams] == [False, True, True]
        for stream in here.streams:
            stream.connection.close()
        with pytest.raises(LostError, match="closed by peer"):
            read_all(there, order)


@pytest.mark.parametrize("count", [1, MARK.size, MARK.size + 1])
def test_a_connection_that_ends_within_a_frame_is_a_loss(count: int) -> None:
    with pair(several=3) as (here, there):
        ask(there, torch.zeros(5), (1, 1, 0))
        frame = MARK.pack(0, 1, 1, 0, 20, 20) + bytes(20)
        here.connection.sendall(frame[:count])
        here.connection.close()
        with pytest.raises(LostError, match="closed by peer"):
            read_all(there, [0] * 5)


@pytest.mark.parametrize("far", [False, True])
def test_a_thread_is_woken_by_a_message_that_is_shorter_than_its_room(
    far: bool,
) -> None:
    """By TCP: other sockets wake it for a single byte anyway."""
    x, into = torch.arange(3.0), torch.zeros(1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        with one, server.accept()[0] as other:
            here, there = Link(1, one), Link(0, other)
            owner = Outstanding((1, 1, 0), 0, 1)
            there.suit(far)
            there.expect(Coming(0, arrival(into, short=True), owner), early=False)
            there.await_more(there.streams[0])
            Leaving(x, (1, 1, 0)).go(here)
            poll = select.poll()
            poll.register(there.connection, select.POLLIN)
            assert poll.poll(1000)
            there.read()
            assert not owner.unread
            assert into[:3].equal(x)


def test_a_message_that_is_longer_than_its_room_is_told() -> None:
    with pair() as (here, there):
        owner = Outstanding((1, 1, 0), 0, 1)
        there.expect(Coming(0, arrival(torch.zeros(5), True), owner), early=False)
        Leaving(torch.zeros(6), (1, 1, 0)).go(here)
        with pytest.raises(LostError, match=r"of 24 bytes, where .* of 20 bytes"):
            there.read()


def test_what_nobody_has_asked_for_stays_where_it_is_if_nothing_is_behind_it() -> None:
    x, into = torch.arange(10.0), torch.zeros(10)
    with pair() as (here, there):
        Leaving(x, (2, 1, 0)).go(here)
        there.read()
        assert not there._kept
        ask(there, into, (2, 1, 0))
        there.read()
        assert not there._kept
        assert into.equal(x)


def test_a_frame_that_has_begun_leaves_before_anything_else() -> None:
    long, short = torch.arange(200_000.0), torch.ones(3)
    into, other = torch.zeros(200_000), torch.zeros(3)
    with pair() as (here, there):
        first, second = Leaving(long, (1, 1, 0)), Leaving(short, (2, 1, 0))
        first.go(here)
        assert not here.flushed
        assert first.owner.unsent
        second.go(here)
        assert second.owner.unsent == short.nbytes
        owners = ask(there, into, (1, 1, 0)), ask(there, other, (2, 1, 0), early=True)
        for _ in range(1000):
            first.go(here)
            if not first.owner.unsent:
                second.go(here)
            there.read()
            if not any(owner.unread for owner in owners):
                break
        assert into.equal(long)
        assert other.equal(short)
        assert not first.owner.unsent
        assert not second.owner.unsent


@pytest.mark.parametrize("first", ["sent", "asked"])
def test_what_nobody_will_ask_for_any_more_is_told(first: str) -> None:
    with pair() as (here, there):
        if first == "sent":
            Leaving(torch.ones(5), (7, 1, 0)).go(here)
            ask(there, torch.zeros(1), (6, 1, 0), early=True)
            there.read()
            expected = pytest.raises(LostError, match=r"sent item 7, .* where item 8")
            with expected:
                ask(there, torch.zeros(5), (8, 1, 0))
            return
        ask(there, torch.zeros(5), (8, 1, 0))
        Leaving(torch.ones(5), (7, 1, 0)).go(here)
        with pytest.raises(LostError, match=r"sent item 7, .* where item 8"):
            there.read()


@pytest.mark.parametrize(
    "sent", [(3, 2, 5, 20, 20), (3, 1, 6, 20, 20), (3, 1, 5, 24, 24), (3, 1, 5, 20, 21)]
)
def test_frames_of_something_else_are_told(sent: tuple[int, ...]) -> None:
    """Of another request or name, of another length, longer than what is due."""
    with pair() as (here, there):
        ask(there, torch.zeros(5), (3, 1, 5))
        here.connection.sendall(MARK.pack(0, *sent))
        with pytest.raises(
            LostError, match=r"rank 0 sent item 3, .* of 20 bytes was due"
        ):
            there.read()


def pieces(x: Tensor, rng: random.Random, done: list[int]) -> Iterator[Memory]:
    """A tensor's bytes in pieces; what is done after each of them is counted."""
    memory, at = memory_of(x), 0
    while at < len(memory):
        end = at + rng.choice([1, 7, 1000, 1 << 17])
        yield memory[at:end]
        done.append(min(end, len(memory)) - at)
        at = end


@pytest.mark.parametrize("several", [1, 2, 7])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_sending_and_asking_arrives(
    seed: int, far: bool, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    if seed % 2:  # little is kept before its turn
        monkeypatch.setattr(streams, "AHEAD", 20_000)
    requests = {item: rng.randint(1, 3) for item in range(6)}
    messages = {
        (item, request, item): torch.randint(0, 99, (rng.choice([1, 9, 90_000]),))
        for item, count in requests.items()
        for request in range(count)
    }
    # Some messages are shorter than what they arrive in.
    rooms = {
        asked: torch.zeros(len(x) + rng.choice([0, 0, 1, 70_000]), dtype=x.dtype)
        for asked, x in messages.items()
    }
    into = {asked: rooms[asked][: len(x)] for asked, x in messages.items()}
    leaving = {asked: Leaving(x, asked) for asked, x in messages.items()}
    owners: dict[Asked, Outstanding] = {}
    done: list[int] = []
    to_send, to_ask = [*leaving], [*into]

    def some(left: list[Asked]) -> Asked:
        """Of one item after the other in any order, but of each in its own."""
        item = rng.choice([asked[0] for asked in left])
        return next(asked for asked in left if asked[0] == item)

    with pair(far, several) as (here, there):
        for _ in range(100_000):
            if to_send and rng.random() < 0.5:
                asked = some(to_send)
                leaving[asked].go(here)
                if not leaving[asked].rest:
                    to_send.remove(asked)
            here.flush()
            if to_ask and rng.random() < 0.1:
                asked = some(to_ask)
                to_ask.remove(asked)
                owners[asked] = owner = Outstanding(asked, 0, 1)
                room = rooms[asked]
                if len(room) > len(into[asked]):
                    coming = arrival(room, short=True)
                    done.append(into[asked].nbytes)
                else:
                    coming = Arrival(room.nbytes, pieces(room, rng, done))
                there.expect(Coming(0, coming, owner), early=True)
            for stream in rng.sample(there.streams, several):
                if rng.random() < 0.7:
                    there.read(stream)
            if not to_ask and not any(owner.unread for owner in owners.values()):
                break
        assert not there._kept
        assert not there._ahead
        assert not there._held
        assert not there.coming
    assert all(into[asked].equal(x) for asked, x in messages.items())
    assert not any(rooms[asked][len(x) :].any() for asked, x in messages.items())
    assert sum(done) == sum(x.nbytes for x in messages.values())
    assert not any(each.owner.unsent for each in leaving.values())
