"""What two ranks tell each other beside exchanges: whole, or lost with a reason."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gradtide.transport.channel import PIECE, Channel

SECONDS = 0.5
Two = tuple[Channel, Channel]


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        return one, door.accept()[0]


@pytest.fixture(params=["unix", "tcp"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    one, other = tcp() if request.param == "tcp" else socket.socketpair()
    with one, other:
        yield Channel(one, SECONDS), Channel(other, SECONDS)


def test_words_and_pieces_arrive_in_order(two: Two) -> None:
    here, there = two
    data = bytes(range(256)) * (PIECE // 100)

    def send() -> None:
        here.tell({"size": len(data)})
        for start in range(0, len(data), PIECE):
            here.send(memoryview(data)[start : start + PIECE])
        here.tell({"then": "words"})

    thread = threading.Thread(target=send)
    thread.start()
    size = there.hear()["size"]
    assert b"".join(map(bytes, there.pieces(size))) == data
    assert there.hear() == {"then": "words"}
    thread.join()
    assert list(there.pieces(0)) == []


@pytest.mark.waits
def test_who_has_no_reason_to_speak_is_waited_for(two: Two) -> None:
    here, there = two
    timer = threading.Timer(2 * SECONDS, here.tell, [{"late": 1}])
    timer.start()
    assert there.hear(ever=True) == {"late": 1}


@pytest.mark.waits
def test_silence_ends_it_and_is_told_again(two: Two) -> None:
    _, there = two
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(ConnectionError, match=r"silent for 0\.5 s"):
            there.hear()
    with pytest.raises(ConnectionError, match="silent"):
        there.tell({})
    assert time.monotonic() - begin < 2 * SECONDS


def test_who_takes_nothing_is_silent(two: Two) -> None:
    here, _ = two

    def send() -> None:
        for _ in range(1000):
            here.send(bytes(PIECE))

    with pytest.raises(ConnectionError, match="silent"):
        send()


def test_an_end_in_the_middle_is_no_end(two: Two) -> None:
    here, there = two
    here.send(b"half")
    here.close()
    with pytest.raises(ConnectionError, match="the other rank has ended"):
        list(there.pieces(5))
    with pytest.raises(ConnectionError, match="it is closed"):
        here.tell({})
    here.close("later")


def test_who_waits_for_ever_learns_of_the_end(two: Two) -> None:
    here, there = two
    threading.Timer(0.1, here.close).start()
    with pytest.raises(ConnectionError):
        there.hear(ever=True)


@pytest.mark.parametrize("said", [b"\0\0\0\2[]", b"\0\0\0\1{", b"\xff" * (1 << 17)])
def test_what_are_no_words_end_it(said: bytes, two: Two) -> None:
    here, there = two
    here.send(said)
    with pytest.raises(ConnectionError):
        there.hear()
    with pytest.raises(ConnectionError):
        there.hear()


def test_routers_do_not_forget_it() -> None:
    one, other = tcp()
    with one, other:
        Channel(one, SECONDS)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.gettimeout() == SECONDS
