"""Plain connections: who answers, how fast, and how those who do not are told."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from gradtide.doctor import pairs
from gradtide.doctor.pairs import Listener, reach, send

HERE = "127.0.0.1"


@pytest.fixture
def both() -> Iterator[tuple[Listener, Listener]]:
    made = Listener(0, "word", HERE), Listener(1, "word", HERE)
    yield made
    for listener in made:
        listener.close()


def test_who_answers_is_heard(both: tuple[Listener, Listener]) -> None:
    first, second = both
    heard = reach(second, {0: (HERE, first.port)}, [0])[0]
    assert heard.error == ""
    assert 0 < heard.round_trip < 5
    assert abs(heard.clock) < 1


def test_a_transfer_is_timed_by_who_receives(both: tuple[Listener, Listener]) -> None:
    first, second = both
    send(second, (HERE, first.port), 0, 0.2, far=False)
    assert first.rates[1] > 1e6
    assert second.rates == {}


def test_who_does_not_answer_is_told_in_words(
    both: tuple[Listener, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "PATIENCE", 0.3)
    first, second = both
    stranger = Listener(2, "another", HERE)
    with socket.create_server((HERE, 0)) as closed:
        port = closed.getsockname()[1]
    with socket.create_server((HERE, 0)) as silent:
        doors = {
            0: (HERE, port),
            2: (HERE, stranger.port),
            3: (HERE, first.port),
            4: (HERE, silent.getsockname()[1]),
        }
        heard = reach(second, doors, doors)
    stranger.close()
    told = {rank: found.error for rank, found in heard.items()}
    assert told == {
        0: "connection refused",
        2: "somebody else listens there",
        3: "rank 0 answers there: two hosts with one address",
        4: "no answer in 0.3 seconds",
    }


def test_strangers_that_say_anything_are_sent_away(
    both: tuple[Listener, Listener], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = both
    for said in (b"1", b"[]", b'"word"', b"{}", b"[" * 4000, b"\xff", b'{"word": [1]}'):
        with socket.create_connection((HERE, first.port)) as stranger:
            stranger.sendall(said + b"\n")
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
    assert reach(second, {0: (HERE, first.port)}, [0])[0].error == ""
    assert capfd.readouterr().err == ""
