"""Streams of bytes between ranks that are threads of this process."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtide.core.ops import Group
from gradtide.transport import link, opening, ring, rotation, stream
from gradtide.transport import links as streams
from gradtide.transport.addresses import Chosen
from gradtide.transport.link import Arrival
from gradtide.transport.links import (
    Links,
    Peers,
    Transfer,
    arrival,
    memory_of,
)
from gradtide.transport.opening import HELLO, Door, Meeting
from gradtide.transport.stream import LostError

SIZES = [2, 3, 4, 5, 7, 8, 16]
LIMIT = 30.0


def nothing() -> None: ...


@contextmanager
def connected(
    size: int, seconds: float = LIMIT, inside: bool = True, several: int = 1
) -> Iterator[list[Links]]:
    """`inside`: as ranks of one host connect, otherwise by `several` of TCP."""
    meetings = [Meeting(Group(rank, size), seconds) for rank in range(size)]
    doors = [meeting.door for meeting in meetings]
    if several > 1 or not inside:
        doors = [door._replace(name="") for door in doors]
    for meeting in meetings:
        meeting.doors = doors
    links = [Links(meeting, 0, streams.TRACKS, seconds) for meeting in meetings]
    for each in links:
        each.suit(False, several)
    try:
        yield links
    finally:
        for meeting in meetings:
            meeting.close()


def together(work: Callable[[int], Any], size: int) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(work, range(size), timeout=LIMIT)]


def values(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    """Small integers: sums are exact in every dtype and order."""
    rng = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (n,), generator=rng).to(dtype)


def shapes(size: int) -> list[list[int]]:
    """Lengths of the parts of a buffer: the last ones go in many pieces."""
    lonely = [300_000 if rank == size // 2 else 3 for rank in range(size)]
    uneven = [(3 * rank + 1) % 5 for rank in range(size)]
    return [[4] * size, uneven, [0] * (size - 1) + [9], lonely, [70_001] * size]


@pytest.mark.product(each=6)
@pytest.mark.pairs(
    inside=[True, False],
    several=[1, 3],
    size=SIZES,
    dtype=[torch.float32, torch.bfloat16, torch.int64],
)
def test_rings_and_single_hops_sum_and_gather_everything(
    inside: bool, several: int, size: int, dtype: torch.dtype
) -> None:
    with connected(size, inside=inside, several=several) as links:

        def work(rank: int) -> None:
            everybody = range(size)
            for turn, lengths in enumerate(shapes(size)):
                total = sum(values(r, sum(lengths), dtype) for r in everybody)
                for way in (ring, rotation):
                    x = values(rank, sum(lengths), dtype)
                    parts = x.split_with_sizes(lengths)
                    asked = Peers(Group(rank, size), links[rank].track(turn), everybody)
                    more = (1,) if way is rotation else ()
                    for begin in (way.reduce_scatter, way.all_gather):
                        transfer = begin(parts, asked, *more)
                        links[rank].add(transfer, early=False)
                        transfer.finish(nothing)
                        more = ()
                    assert torch.equal(x, total), (way.__name__, lengths)
                x = values(rank, sum(lengths), dtype)
                transfer = ring.all_reduce(x.split_with_sizes(lengths), asked)
                links[rank].add(transfer, early=False)
                transfer.finish(nothing)
                assert torch.equal(x, total), lengths

        together(work, size)


@pytest.mark.parametrize("several", [1, 5])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_ring_and_a_single_hop_have_the_same_bits(size: int, several: int) -> None:
    with connected(size, several=several) as links:

        def work(rank: int) -> list[Tensor]:
            asked = Peers(Group(rank, size), links[rank].track(0), range(size))
            rng = torch.Generator().manual_seed(rank)
            x = torch.randn(1000 * size, generator=rng)
            found = []
            for begin in (
                lambda parts: ring.reduce_scatter(parts, asked, size),
                lambda parts: rotation.reduce_scatter(parts, asked, 1, size),
                lambda parts: ring.all_reduce(parts, asked, size),
            ):
                parts = x.clone().tensor_split(size)
                transfer = begin(parts)
                links[rank].add(transfer, early=False)
                transfer.finish(nothing)
                found.append(parts[rank])
            return found

        for first, *others in together(work, size):
            assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("several", [1, 4])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_next_item_moves_while_one_is_at_work(size: int, several: int) -> None:
    """Whichever rank begins it early, and whether its ranks are connected by then."""
    with connected(size, several=several) as links:

        def work(rank: int) -> None:
            own, begun = links[rank], {}

            def begin(item: int, early: bool) -> tuple[Tensor, Peers, Transfer]:
                own.track(item).asked = item, 1, 0
                x = torch.full((size * (item % 7 + 1),), float(item))
                asked = Peers(Group(rank, size), own.track(item), range(size))
                way, more = (ring, ()) if item % 3 else (rotation, (1,))
                transfer = way.reduce_scatter(x.tensor_split(size), asked, *more)
                own.add(transfer, early)
                return x, asked, transfer

            for item in range(40):
                x, asked, transfer = begun.pop(item, None) or begin(item, early=False)
                if (item + rank) % 2:
                    begun[item + 1] = begin(item + 1, early=True)
                transfer.finish(nothing)
                transfer = ring.all_gather(x.tensor_split(size), asked)
                own.add(transfer, early=False)
                transfer.finish(nothing)
                assert x.unique().tolist() == [size * item]

        together(work, size)


@pytest.mark.parametrize(
    ("far", "most", "tuned", "asks"),
    [
        (False, 0, 0, False),
        (False, stream.HELD, 0, True),
        (True, stream.HELD, 4 * stream.HELD, False),
        (True, stream.HELD, stream.HELD, True),
    ],
)
def test_sockets_hold_more_where_the_system_lets_them(
    far: bool, most: int, tuned: int, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_most_held", lambda: most)
    monkeypatch.setattr(stream, "_most_tuned", lambda: tuned)
    asked: list[int] = []

    class Watched(socket.socket):
        def setsockopt(self, level: int, option: int, value: Any) -> None:  # type: ignore[override]
            asked.append(option)
            super().setsockopt(level, option, value)

    with Watched(socket.AF_INET) as connection:
        link.Link(1, connection).suit(far)
    assert (socket.SO_SNDBUF in asked) == asks


def send(links: Links, peer: int, x: Tensor) -> Transfer:
    return Transfer(links.track(0), deque([(peer, memory_of(x))]), {})


def receive(links: Links, peer: int, x: Tensor) -> Transfer:
    return Transfer(links.track(0), deque(), {peer: arrival(x)})


def run(links: Links, transfer: Transfer) -> None:
    links.add(transfer, early=False)
    transfer.finish(nothing)


@pytest.mark.parametrize("several", [1, 2, 16])
@pytest.mark.parametrize("far", [False, True])
def test_what_travels_together_arrives_in_order(several: int, far: bool) -> None:
    x, y = torch.arange(200_000.0), -torch.arange(200_000.0)
    with connected(2, inside=several == 1) as links:

        def work(rank: int) -> None:
            own = links[rank]
            if rank == 0:  # there is one connection before there are several
                run(own, send(own, 1, x))
            else:
                run(own, receive(own, 0, torch.empty(200_000)))
            own.suit(far, several)
            found = [torch.empty(200_000) for _ in range(4)]
            transfers = [
                send(own, 1, each) if rank == 0 else receive(own, 0, into)
                for each, into in zip((x, y, y, x), found, strict=True)
            ]
            for transfer in transfers:
                own.add(transfer, early=False)
            for transfer in transfers:
                transfer.finish(nothing)
            if rank == 1:
                assert len(own.to[0].streams) == several
                assert all(map(torch.equal, found, (x, y, y, x)))

        together(work, 2)


@pytest.mark.parametrize("several", [1, 6])
def test_what_began_early_keeps_its_place_before_connections_are_there(
    several: int,
) -> None:
    """One rank began the first request early, the other one when it was due."""
    x, y = torch.arange(1000.0), -torch.arange(1000.0)
    with connected(2, several=several) as links:

        def work(rank: int) -> None:
            own = links[rank]
            into = [torch.empty(1000), torch.empty(1000)]
            transfers = [
                Transfer(
                    own.track(0),
                    deque([(1 - rank, memory_of(each))]),
                    {1 - rank: there},
                )
                for each, there in zip((x, y), map(arrival, into), strict=True)
            ]
            own.add(transfers[0], early=rank == 0)
            own.add(transfers[1], early=False)
            for transfer in transfers:
                transfer.finish(nothing)
            assert all(map(torch.equal, into, (x, y)))

        together(work, 2)


@pytest.mark.parametrize(("length", "item"), [(4, 7), (6, 7), (5, 8)])
def test_ranks_that_ask_for_different_things_are_told(length: int, item: int) -> None:
    with connected(2) as links:
        links[0].track(0).asked = 7, 1, 0
        links[1].track(0).asked = item, 1, 0

        def work(rank: int) -> None:
            if rank == 0:
                run(links[0], send(links[0], 1, torch.ones(5)))
                return
            with pytest.raises(LostError, match=r"sent item 7, request 1 of 20 bytes"):
                run(links[1], receive(links[1], 0, torch.zeros(length)))

        together(work, 2)


@pytest.mark.parametrize("inside", [True, False])
def test_strangers_at_the_door_are_sent_away(inside: bool) -> None:
    with connected(2, inside=inside) as links:
        door = links[0]._meeting.doors[1]
        strangers = [knock(door) for _ in range(3)]
        strangers[0].sendall(HELLO.pack(b"?" * 32, 0, 0) + b"x" * 40)
        strangers[1].close()
        strangers[2].sendall(b"GET / HTTP/1.1\r\n\r\n" + b" " * 40)
        x = torch.zeros(5)
        works = [lambda: run(links[0], send(links[0], 1, torch.ones(5)))]
        works.append(lambda: run(links[1], receive(links[1], 0, x)))
        together(lambda rank: works[rank](), 2)
        assert x.tolist() == [1.0] * 5
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("inside", [True, False])
def test_who_says_again_what_a_rank_has_said_is_sent_away(
    inside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(2, inside=inside) as links:
        meetings = [each._meeting for each in links]
        door = meetings[0].doors[1]
        hello = HELLO.pack(door.word, 0, 0)
        genuine = meetings[0].call(1, 0)
        strangers = [knock(door) for _ in range(4)]
        # Before it is picked up; of a lane and rank that are not due; and afterwards.
        for stranger, said in zip(
            strangers,
            (hello, HELLO.pack(door.word, 1, 0), HELLO.pack(door.word, 2, 0)),
            strict=False,
        ):
            stranger.sendall(said)
        later = meetings[0].call(1, 1)  # all are heard before this one
        answered = meetings[1].answer(0, 1)
        strangers[3].sendall(hello)
        meetings[1]._seconds = 0.6
        with pytest.raises(TimeoutError):
            meetings[1].answer(0, 2)
        first = meetings[1].answer(0, 0)
        for near, far in ((genuine, first), (later, answered)):
            near.sendall(b"genuine")
            far.settimeout(LIMIT)
            assert far.recv(7) == b"genuine"
        for stranger in strangers:
            stranger.settimeout(LIMIT)
            assert stranger.recv(1) == b""
            stranger.close()
    told = [r.getMessage() for r in caplog.records if "sent away" in r.getMessage()]
    assert len(told) == 3  # of four: the log names a few


@pytest.mark.parametrize("inside", [True, False])
def test_nobody_waits_for_a_stranger_to_speak(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "MANY", 20)
    with connected(2, inside=inside) as links:
        door = links[0]._meeting.doors[1]
        strangers = [knock(door) for _ in range(60)]  # more than are listened to
        for stranger in strangers[::2]:
            stranger.sendall(b"half a hello")
        x = torch.zeros(5)
        works = [lambda: run(links[0], send(links[0], 1, torch.ones(5)))]
        works.append(lambda: run(links[1], receive(links[1], 0, x)))
        begin = time.monotonic()
        together(lambda rank: works[rank](), 2)
        assert x.tolist() == [1.0] * 5
        assert time.monotonic() - begin < opening.WORD
        for stranger in strangers:
            stranger.close()


def knock(door: Door) -> socket.socket:
    if not door.name:
        return socket.create_connection(door[:2])
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(door.name)
    return stranger


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_ranks_of_one_host_use_its_own_sockets() -> None:
    with connected(2) as links:
        x = torch.zeros(5)
        works = [lambda: run(links[0], send(links[0], 1, torch.ones(5)))]
        works.append(lambda: run(links[1], receive(links[1], 0, x)))
        together(lambda rank: works[rank](), 2)
        for rank, own in enumerate(links):
            connection = own.to[1 - rank].connection
            assert connection.family == socket.AF_UNIX


@pytest.mark.parametrize("inside", [True, False])
def test_a_rank_that_hangs_up_is_named(inside: bool) -> None:
    with connected(2, inside=inside) as links:

        def work(rank: int) -> None:
            own = links[rank]
            if rank == 0:
                run(own, send(own, 1, torch.ones(1)))
                own._meeting.hang_up()
                return
            run(own, receive(own, 0, torch.ones(1)))
            with pytest.raises(LostError, match=r"closed by peer") as error:
                run(own, receive(own, 0, torch.ones(1)))
            assert error.value.peer == 0

        together(work, 2)


def test_a_rank_that_never_moves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LOOK", 0.2)
    with connected(3, 0.5) as links:
        own = links[0]  # the other ranks have a door alone
        with pytest.raises(LostError, match=r"Timed out after 0.5 s") as error:
            run(own, send(own, 2, torch.zeros(30_000_000)))
        assert error.value.peer == 2
        own = links[1]
        with pytest.raises(LostError, match=r"no call in 0.5 s") as error:
            run(own, receive(own, 0, torch.zeros(1)))
        assert error.value.peer == 0


def test_a_timeout_is_no_longer_than_it_says() -> None:
    with connected(2, 0.3) as links:
        begin = time.monotonic()
        with pytest.raises(LostError, match=r"Timed out after 0.3 s"):
            run(links[0], send(links[0], 1, torch.zeros(30_000_000)))
        assert time.monotonic() - begin < streams.LOOK


def test_who_is_waited_for_is_named_in_time_though_others_move() -> None:
    """What began early arrives meanwhile: that is no sign of who is waited for."""
    with connected(3, 0.6) as links:
        own, moving = links[0], threading.Event()
        for each in links:
            each.track(0).asked, each.track(1).asked = (3, 1, 0), (4, 1, 0)
        wanted = Transfer(
            own.track(0),
            deque(),
            {peer: arrival(torch.ones(1)) for peer in (1, 2)},
        )
        x = torch.zeros(40)
        pieces = Arrival(x.nbytes, iter([memory_of(part) for part in x.split(1)]))
        early = Transfer(own.track(1), deque(), {2: pieces})

        def move() -> None:
            connection = links[2]._meeting.answer(0, 0)
            for item, n in ((3, 4), (4, x.nbytes)):  # its part of both
                mark = link.MARK.pack(item - 3, item, 1, 0, n, n)
                connection.sendall(mark)
                connection.sendall(bytes(4 if item == 3 else 0))
            for part in x.split(1):
                if moving.wait(0.1):
                    return
                connection.sendall(memory_of(part))

        def called() -> None:
            links[1]._meeting.answer(0, 0)

        others = [threading.Thread(target=work) for work in (move, called)]
        for other in others:
            other.start()
        own.add(wanted, early=False)
        own.add(early, early=False)
        begin = time.monotonic()
        with pytest.raises(LostError, match=r"Timed out after 0.6 s") as error:
            wanted.finish(nothing)
        moving.set()
        for other in others:
            other.join()
        assert time.monotonic() - begin < 2
        assert error.value.peer == 1


def test_who_waits_is_woken_when_the_links_are_closed() -> None:
    with connected(2) as links:

        def work(rank: int) -> None:
            own = links[rank]
            run(
                own,
                send(own, 1, torch.ones(1))
                if rank == 0
                else receive(own, 0, torch.ones(1)),
            )
            if rank == 0:
                threading.Timer(0.3, own._meeting.hang_up).start()
            begin = time.monotonic()
            with pytest.raises(LostError):
                run(own, receive(own, 1 - rank, torch.ones(1)))
            assert time.monotonic() - begin < 5

        together(work, 2)


def test_a_rank_that_cannot_be_reached_is_named_with_the_remedy() -> None:
    with connected(2) as links:
        links[1]._meeting.close()
        with pytest.raises(LostError, match=r"no connection to .*GLOO_SOCKET_IFNAME"):
            run(links[0], send(links[0], 1, torch.ones(1)))


def test_a_rank_alone_listens_nowhere() -> None:
    assert Meeting(Group(0, 1), LIMIT).door.port == 0


def test_ranks_meet_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    six = Chosen("::1", "lo", "a test")
    monkeypatch.setattr("gradtide.transport.opening.chosen", lambda: six)
    with connected(2) as links:
        x = torch.zeros(5)
        works = [lambda: run(links[0], send(links[0], 1, torch.ones(5)))]
        works.append(lambda: run(links[1], receive(links[1], 0, x)))
        together(lambda rank: works[rank](), 2)
        assert x.tolist() == [1.0] * 5
