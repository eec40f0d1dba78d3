"""Copies of files, from thread to thread; and what becomes of them if that fails."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtide.checkpoint import copies
from gradtide.checkpoint.copies import Copies, NotKeptError
from gradtide.checkpoint.files import Folder
from gradtide.checkpoint.writer import Writer
from gradtide.transport.channel import PIECE, Channel

SECONDS = 1.0


class Pair:
    """Rank 1, whose file rank 0 keeps."""

    def __init__(self, path: Path, seconds: float = SECONDS) -> None:
        self.sockets = socket.socketpair()
        here, there = (Channel(each, seconds) for each in self.sockets)
        self.here, self.there = Folder(path / "1"), Folder(path / "0")
        self.sender = Copies(self.here, 1, keeping={0: here})
        self.keeper = Copies(self.there, 0, kept={1: there})

    def write(self, step: int, size: int = 10, run: str = "a") -> str:
        about = {"run": run, "step": step, "size": 2, "rank": 1, "kind": "rank"}
        name = f"step-{step}/rank1.pt"
        self.here.write(name, {"x": torch.arange(size)}, about)
        self.sender.expect()
        self.keeper.expect()
        return name

    def close(self) -> None:
        self.keeper.close()
        self.sender.close()
        for each in self.sockets:
            each.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path)
    yield found
    with suppress(OSError):
        found.close()


@pytest.mark.parametrize("size", [1, 1000, PIECE // 2])
def test_a_copy_is_the_file(size: int, pair: Pair) -> None:
    for step in (3, 6):
        name = pair.write(step, size)
        pair.sender.send(name)
        assert pair.there.read(name) == pair.here.read(name)
        assert pair.there.names(f"step-{step}") == ["rank1.pt"]


def test_what_is_there_is_not_sent(pair: Pair, monkeypatch: Any) -> None:
    """As where hosts share a folder."""
    name = pair.write(3)
    pair.sender.send(name)
    monkeypatch.setattr(copies.files, "copy", None)  # nothing is to arrive
    pair.sender.send(name)
    pair.write(3, run="b")  # of a later run: the same place, another file
    with pytest.raises(NotKeptError, match="rank 0 keeps no copy of it: TypeError"):
        pair.sender.send(name)


@pytest.mark.waits
def test_a_save_without_a_file_is_none(pair: Pair) -> None:
    pair.write(3)
    pair.sender.skip()
    name = pair.write(6)
    pair.sender.send(name)
    begin = time.monotonic()
    pair.keeper.close()  # both are over
    assert time.monotonic() - begin < SECONDS
    assert pair.there.names() == ["step-6"]


def test_a_file_that_cannot_be_read_is_told_to_nobody_but_as_none(pair: Pair) -> None:
    with pytest.raises(FileNotFoundError):
        pair.sender.send("step-3/rank1.pt")
    pair.sender.send(pair.write(6))
    assert pair.there.names() == ["step-6"]


def test_a_full_disk_is_told_and_the_next_file_is_kept(
    pair: Pair, monkeypatch: Any
) -> None:
    def full(file: Any, pieces: Any, size: int, seal: bytes) -> None:
        file.write(next(pieces))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(copies.files, "copy", full)
        name = pair.write(3, PIECE)
        with pytest.raises(NotKeptError, match=r"rank 0 keeps no copy.*No space") as e:
            pair.sender.send(name)
    assert pair.there.path(name) in str(e.value)  # where that was
    assert pair.there.names("step-3") == []
    pair.sender.send(pair.write(6, PIECE))
    assert pair.there.names("step-6") == ["rank1.pt"]


def test_what_changes_on_its_way_is_no_copy(pair: Pair, monkeypatch: Any) -> None:
    name = pair.write(3, PIECE)
    plain = Folder.pieces

    def changed(self: Folder, name: str, size: int) -> Iterator[bytes]:
        for number, piece in enumerate(plain(self, name, size)):
            yield piece if number else bytes([piece[0] ^ 1, *piece[1:]])

    monkeypatch.setattr(Folder, "pieces", changed)
    with pytest.raises(NotKeptError, match="it has arrived changed"):
        pair.sender.send(name)
    assert pair.there.names("step-3") == []


def test_the_file_of_another_rank_is_not_taken(pair: Pair) -> None:
    about = {"run": "a", "step": 3, "size": 2, "rank": 0, "kind": "rank"}
    pair.here.write("step-3/rank1.pt", {}, about)
    with pytest.raises(NotKeptError, match="the other rank has ended"):
        pair.sender.send("step-3/rank1.pt")
    assert pair.there.names() == []


@pytest.mark.waits
def test_a_keeper_that_is_silent_ends_it_and_the_next_one_at_once(pair: Pair) -> None:
    pair.keeper._keep = lambda *_: time.sleep(3 * SECONDS)  # type: ignore
    name, begin = pair.write(3), time.monotonic()
    for _ in range(2):
        with pytest.raises(NotKeptError, match=r"rank 0 keeps no copy.*silent for 1 s"):
            pair.sender.send(name)
    assert time.monotonic() - begin < 2 * SECONDS


def test_a_keeper_that_ends_is_told_of(pair: Pair) -> None:
    name = pair.write(3)
    pair.sockets[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(NotKeptError, match="rank 0 keeps no copy"):
        pair.sender.send(name)
    pair.sender.skip()


def test_all_keepers_are_told_if_one_ends(tmp_path: Path) -> None:
    one, other = Pair(tmp_path / "one"), Pair(tmp_path / "other")
    channels = {2: one.sender._keeping[0], 3: other.sender._keeping[0]}
    sender = Copies(one.here, 1, keeping=channels)
    name = one.write(3)
    one.sockets[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(NotKeptError, match=r"^rank 2 keeps no copy") as error:
        sender.send(name)
    assert "rank 3" not in str(error.value)
    assert other.there.names("step-3") == ["rank1.pt"]
    one.close()
    other.close()


@pytest.mark.waits
def test_who_closes_waits_for_what_is_on_its_way(pair: Pair) -> None:
    name = pair.write(3)
    timer = threading.Timer(SECONDS / 2, pair.sender.send, [name])
    timer.start()
    pair.keeper.close()
    timer.join()
    assert pair.there.names("step-3") == ["rank1.pt"]


@pytest.mark.waits
def test_who_closes_waits_for_nobody_who_is_silent_or_gone(pair: Pair) -> None:
    pair.write(3)
    begin = time.monotonic()
    pair.keeper.close()
    assert SECONDS / 2 < time.monotonic() - begin < 2 * SECONDS
    with pytest.raises(NotKeptError):
        pair.sender.send("step-3/rank1.pt")
    begin = time.monotonic()
    pair.keeper.close()
    assert time.monotonic() - begin < SECONDS / 2


def test_a_save_is_over_when_its_copy_is(tmp_path: Path) -> None:
    pair, go = Pair(tmp_path), threading.Event()
    keep = pair.keeper._keep

    def slow(*arguments: Any) -> Any:
        go.wait()
        return keep(*arguments)

    pair.keeper._keep = slow  # type: ignore[method-assign]
    writer = Writer(pair.here, 1, keep=1, copies=pair.sender)
    about = {"run": "a", "step": 3, "size": 2, "rank": 1}
    writer.save(about, {"rank": {}})
    while not pair.here.exists("step-3/rank1.pt"):
        time.sleep(0.01)
    assert (writer.torn, writer.failures) == (1, 0)
    go.set()
    writer.wait()
    assert (writer.torn, writer.failures) == (0, 0)
    assert pair.there.exists("step-3/rank1.pt")
    writer.close()
    pair.close()


@pytest.mark.waits
def test_a_save_that_cannot_be_written_has_no_copy(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    writer = Writer(pair.here, 1, keep=1, copies=pair.sender)
    pair.here.make()
    (tmp_path / "1" / "step-3").write_text("in the way")
    about = {"run": "a", "step": 3, "size": 2, "rank": 1}
    pair.keeper.expect()
    writer.save(about, {"rank": {}})
    writer.wait()
    assert writer.failures == 1
    begin = time.monotonic()
    pair.keeper.close()
    assert time.monotonic() - begin < SECONDS / 2
    pair.close()


def test_an_old_copy_that_is_damaged_is_sent_again(pair: Pair) -> None:
    """Its end, which is looked at after each save, is what it was."""
    name = pair.write(3, 1000)
    pair.sender.send(name)
    copied = Path(pair.there.path(name))
    whole = copied.read_bytes()
    copied.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    pair.sender.send(name)
    assert copied.read_bytes() != whole
    pair.sender.send(name, old=True)
    assert copied.read_bytes() == whole
