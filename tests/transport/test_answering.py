"""A store that does not answer holds nobody up."""

from __future__ import annotations

import gc
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradtide.core.ops import Group
from gradtide.core.transport import Progress
from gradtide.transport.answering import Answering, SilentError
from gradtide.transport.fault import FailureReporter


class Busy(dist.HashStore):
    """A store that answers when it is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.woken.wait(20)
        return super().check(keys)


class Stopped(Busy):
    """One at a port, whose host is stopped."""

    port = 1


def asked(store: Any, seconds: float = 5.0) -> Answering:
    return Answering(store, seconds)


def test_answers_and_errors_are_those_of_the_store() -> None:
    store = asked(dist.HashStore())
    store.set("a", "1")
    assert (store.get("a"), store.check(["a"]), store.check(["b"])) == (
        b"1",
        True,
        False,
    )
    with pytest.raises(TypeError):
        store.set("a", 1)  # type: ignore[arg-type]
    assert store.get("a") == b"1"


class Late(dist.HashStore):
    """A store that is busy with somebody else for longer than torch waits."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def get(self, key: str) -> bytes:
        self.times -= 1
        if self.times >= 0:
            time.sleep(0.1)
            raise dist.DistStoreError("wait timeout after 100ms")
        found: bytes = super().get(key)
        return found


def test_a_busy_store_is_asked_again() -> None:
    plain = Late(3)
    plain.set("a", "1")
    assert asked(plain).get("a") == b"1"
    with pytest.raises(SilentError):
        asked(Late(1000), 0.3).get("a")


def test_who_has_no_answer_is_told_and_the_next_one_at_once() -> None:
    plain = Stopped()
    store = asked(plain, 0.3)
    begin = time.monotonic()
    for _ in range(20):
        with pytest.raises(SilentError, match="does not answer"):
            store.check(["a"])
    assert 0.3 <= time.monotonic() - begin < 3
    plain.woken.set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert not store.check(["a"])
            return
        except SilentError:
            time.sleep(0.01)
    pytest.fail("it answers again, and nobody hears")


def test_a_file_that_a_stopped_rank_has_locked_holds_nobody_up(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    file = tmp_path / "store"
    plain = dist.PrefixStore("a", dist.FileStore(str(file), 2))
    plain.set("b", "1")
    store = asked(plain, 0.3)
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # as who is stopped while it looks
        assert store.check(["b"])
        begin = time.monotonic()
        with pytest.raises(SilentError, match="does not answer"):
            store.set("c", "")
        assert time.monotonic() - begin < 3


@pytest.mark.product
@pytest.mark.parametrize("ends", [True, False])
def test_its_thread_ends(ends: bool) -> None:
    before = set(threading.enumerate())
    store = asked(dist.HashStore())
    store.check(["a"])
    (thread,) = set(threading.enumerate()) - before
    if ends:
        store.end()
        thread.join(5)
        assert not store.check(["a"])  # by another one
    del store
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (0, "rank 0 does not respond .* and the job's store is there"),
        (None, "the job's store does not answer, nor does rank 0"),
    ],
)
def test_who_hosts_a_store_that_is_silent_is_named(host: Any, words: str) -> None:
    store = asked(Stopped(), 0.2)
    own = FailureReporter(store, Group(1, 2), Progress(), lambda _: False, host)
    begin = time.monotonic()
    text = own.explain("Mean", RuntimeError("Timed out after 5 s"), 0)
    assert time.monotonic() - begin < 1.5
    assert text.startswith("rank 1: Mean failed in step 1: ")
    assert re.search(words, text)
