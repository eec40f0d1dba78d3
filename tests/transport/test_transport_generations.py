"""Default groups one after the other."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.lighthouse import Job

from gradtide.core.transport import CommunicationError
from gradtide.transport import generations


def _two_generations(name: str, tell: Any, folder: Path) -> list[Any]:
    rank = int(name)
    store, where = generations.open_store()
    Path(folder, f"{name}.new").write_text(where)
    Path(folder, f"{name}.new").rename(Path(folder, name))
    while len(told := [p for p in sorted(folder.iterdir()) if not p.suffix]) < 3:
        time.sleep(0.02)
    addresses, found = [each.read_text() for each in told], []
    for number, ranks in (("1", [0, 1, 2]), ("2", [1, 2])):
        if rank not in ranks:
            time.sleep(1)  # the others meet without it
            continue
        own = ranks.index(rank)
        generations.form(number, [addresses[r] for r in ranks], own, 20.0)
        total = torch.full((2,), float(rank))
        dist.all_reduce(total)
        found.append((dist.get_rank(), dist.get_world_size(), total.tolist()))
    del store
    return found


def test_each_is_the_default_group_of_its_ranks(tmp_path: Path) -> None:
    job = Job(_two_generations, tmp_path)
    for name in "012":
        job.start(name)
    job.wait(lambda *_: None)
    first, second, third = (job.ended[name] for name in "012")
    assert first == [(0, 3, [3.0, 3.0])]
    assert second == [(1, 3, [3.0, 3.0]), (0, 2, [3.0, 3.0])]
    assert third == [(2, 3, [3.0, 3.0]), (1, 2, [3.0, 3.0])]


def _many_generations(name: str, tell: Any, own: bool) -> list[str]:
    """What an error that ends the program looks like in the end."""
    store, where = generations.open_store()
    if own:  # a program may have one of its own
        sys.excepthook = lambda kind, error, _: print(f"Own: {error}", file=sys.stderr)
    for number in range(12):
        generations.form(str(number), [where], 0, 20.0)
    sys.stderr = text = io.StringIO()
    sys.excepthook(ValueError, ValueError("over"), None)
    del store
    return text.getvalue().splitlines()


@pytest.mark.parametrize("own", [False, True])
def test_errors_are_told_with_one_rank_each(own: bool) -> None:
    job = Job(_many_generations, own)
    job.start("0")
    job.wait(lambda *_: None)
    assert job.ended["0"] == [
        "[rank0]: " + ("Own: over" if own else "ValueError: over")
    ]


def _with_one_that_is_gone(name: str, tell: Any, rank: int) -> tuple[str, float]:
    store, where = generations.open_store()
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1 {server.getsockname()[1]}"
    begin = time.monotonic()
    with pytest.raises(CommunicationError) as error:
        generations.form("1", [gone, where] if rank else [where, gone], rank, 20.0)
    assert not dist.is_initialized()
    del store
    return str(error.value), time.monotonic() - begin


def _with_one_that_declines(name: str, tell: Any, rank: int) -> tuple[str, float]:
    (own, where), (other, lives) = generations.open_store(), generations.open_store()
    begin = time.monotonic()
    threading.Timer(1.0, generations.decline, ("1", where)).start()
    with pytest.raises(CommunicationError) as error:
        generations.form("1", [where, lives], rank, 20.0)
    del own, other
    return str(error.value), time.monotonic() - begin


def _address(folder: Path, name: str) -> str:
    """What a rank has told of its store, once it has."""
    while not Path(folder, name).exists():
        time.sleep(0.02)
    return Path(folder, name).read_text()


def _tell(folder: Path, name: str, text: str) -> None:
    Path(folder, f"{name}.new").write_text(text)
    Path(folder, f"{name}.new").rename(Path(folder, name))


def _with_one_that_is_stopped(
    name: str, tell: Any, folder: Path, later: float
) -> tuple[str, float]:
    """It takes calls, as the system does for a process, and does not answer."""
    store, where = generations.open_store()
    generations.MEETING = 2.0, 2.0  # type: ignore[assignment]
    if name == "0":
        _tell(folder, "pid", str(os.getpid()))
        _tell(folder, "0", where)
        time.sleep(later)  # without: the other has not even called yet
        os.kill(os.getpid(), signal.SIGSTOP)
    first, begin = _address(folder, "0"), time.monotonic()
    with pytest.raises(CommunicationError) as error:
        generations.form("1", [first, where], 1, 20.0)
    seconds = time.monotonic() - begin
    os.kill(int(_address(folder, "pid")), signal.SIGKILL)
    del store
    return str(error.value), seconds


@pytest.mark.parametrize("later", [0.0, 0.6])
def test_a_store_that_does_not_answer_is_waited_for_as_long_as_ranks_are(
    tmp_path: Path, later: float
) -> None:
    job = Job(_with_one_that_is_stopped, tmp_path, later)
    for name in "01":
        job.start(name)
    job.wait(lambda *_: None)
    _, seconds = job.ended["1"]
    assert seconds < 8


def _after_a_group_that_did_not_come_to_be(name: str, tell: Any, folder: Path) -> float:
    """One of the ranks has failed while a group was made, and the other has not."""
    store, where = generations.open_store()
    _tell(folder, name, where)
    addresses = [_address(folder, other) for other in "01"]
    if name == "0":
        gather, generations._gather = generations._gather, lambda *_: None
        with pytest.raises(CommunicationError, match="no group of 2 ranks"):
            generations.form("1", addresses, 0, 1.0)
        generations._gather = gather
        _tell(folder, "failed", "")
    _address(folder, "failed")
    generations.form("2", addresses, int(name), 5.0)
    total = torch.ones(1)
    dist.all_reduce(total)
    del store
    return float(total)


def test_a_group_that_did_not_come_to_be_does_not_keep_ranks_apart(
    tmp_path: Path,
) -> None:
    job = Job(_after_a_group_that_did_not_come_to_be, tmp_path)
    for name in "01":
        job.start(name)
    job.wait(lambda *_: None)
    assert job.ended == {"0": 2.0, "1": 2.0}


@pytest.mark.product
@pytest.mark.parametrize(
    ("work", "rank", "words"),
    [
        (_with_one_that_is_gone, 0, "rank 1 is gone"),
        (_with_one_that_is_gone, 1, "rank 0 is gone"),
        (_with_one_that_declines, 0, "has lost another one since"),
    ],
)
def test_nobody_is_waited_for_in_vain(work: Any, rank: int, words: str) -> None:
    job = Job(work, rank)
    job.start("0")
    job.wait(lambda *_: None)
    told, seconds = job.ended["0"]
    assert words in told
    assert seconds < 5


def test_whoever_listens_is_not_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1 {server.getsockname()[1]}"
        assert not generations.is_gone(where)
    assert generations.is_gone(where)
