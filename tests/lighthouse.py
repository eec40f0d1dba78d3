"""Ranks that come and go, for tests: forked processes that a lighthouse counts."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import pytest

from tests import ranks

HEARTBEAT = 1000  # milliseconds after which a silent rank is taken for lost
HOUSE = f"""
import sys
from torchft.coordination import LighthouseServer
house = LighthouseServer("[::]:0", int(sys.argv[1]), 30000, 20, {HEARTBEAT})
print(house.address(), flush=True)
sys.stdin.read()
"""


@contextmanager
def lighthouse(least: int) -> Iterator[str]:
    """A lighthouse that counts at least so many ranks; its address.

    It is a process of its own: its threads would not outlive a fork.
    """
    pytest.importorskip("torchft", reason="gradtide[elastic] is not installed")
    command = [sys.executable, "-c", HOUSE, str(least)]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=null, text=True
    ) as house:
        assert house.stdout is not None
        port = house.stdout.readline().strip().rsplit(":", 1)[1].strip("/")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            house.kill()


class Words(logging.Handler):
    """What is logged, at level WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []
        logging.getLogger("gradtide").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


class Job:
    """Ranks by name: `start` some, and `wait` for what they return or say."""

    def __init__(self, work: Callable[..., Any], *args: Any) -> None:
        """`work(name, tell, *args)` runs on every rank; `tell` sends a word."""
        ranks._load_modules()
        ranks._load_kernels()
        ranks._load_codec()
        self._work, self._args = work, args
        self._context = mp.get_context("fork")
        self._ranks: dict[str, tuple[Any, Any]] = {}
        self.ended: dict[str, Any] = {}

    def start(self, name: str, *args: Any) -> None:
        """Start a rank, with more arguments for `work`."""
        own, others = self._context.Pipe(duplex=False)
        how = name, others, self._work, (*self._args, *args)
        process = self._context.Process(target=_rank, args=how, daemon=True)
        process.start()
        others.close()
        self._ranks[name] = process, own

    def wait(self, heard: Callable[[str, Any], None], limit: float = 240.0) -> None:
        """Hear what ranks tell, until all have ended.

        AssertionError with the traceback of a rank that failed, or the names of those
        that hang.
        """
        deadline = time.monotonic() + limit
        try:
            while open_ := self._open():
                ready = wait(list(open_), max(0.0, deadline - time.monotonic()))
                assert ready, f"{', '.join(open_.values())} hang"
                for pipe in ready:
                    name = open_[pipe]
                    self._hear(name, heard)
        finally:
            for process, _ in self._ranks.values():
                process.kill()
                process.join()

    def _open(self) -> dict[Any, str]:
        return {
            pipe: name
            for name, (_, pipe) in self._ranks.items()
            if name not in self.ended
        }

    def _hear(self, name: str, heard: Callable[[str, Any], None]) -> None:
        process, pipe = self._ranks[name]
        try:
            kind, value = pipe.recv()
        except EOFError:
            process.join()
            kind, value = "end", process.exitcode
        assert kind != "failed", f"{name}: {value}"
        if kind == "end":
            self.ended[name] = value
        else:
            heard(name, value)


def run(work: Callable[..., Any], names: Sequence[str], *args: Any) -> dict[str, Any]:
    """Have ranks of these names do some work; what they return."""
    job = Job(work, *args)
    for name in names:
        job.start(name)
    job.wait(lambda *_: None)
    return job.ended


def _rank(
    name: str, pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # what torch has to say of a store that is gone
    try:
        value = work(name, lambda word: pipe.send(("word", word)), *args)
        pipe.send(("end", value))
        time.sleep(0.3)  # others may be on their way to the end
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    os._exit(0)


def alike(found: Mapping[str, Any]) -> bool:
    """Whether all have the same."""
    return len({str(value) for value in found.values()}) == 1
