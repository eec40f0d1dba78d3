"""Runs one command on every rank of an emulated cluster, and ends what it started.

Knows processes, their output and their order of failing; knows nothing of networks
(`namespaces`) nor of what torchrun sets (`cluster`).
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from rich.console import Console
from rich.text import Text

from gradtide.lab.cluster import PORT, Cluster, LabError, rank_environment
from gradtide.lab.namespaces import Enter, networks
from gradtide.lab.timetable import Timetable

_GRACE = 3.0  # seconds between SIGTERM and SIGKILL
_TAIL = 100  # lines of each rank that are kept for the report of a failure
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
# When its input ends the guard kills the process groups that it was told of.
_GUARD = """while read -r group; do all="$all -$group"; done
kill -s KILL -- $all 2> /dev/null"""


class _Rank(NamedTuple):
    process: subprocess.Popen[str]
    reader: threading.Thread
    waiter: threading.Thread


class _Ranks:
    """The processes of a run; those too that have ended."""

    def __init__(self, begin: Callable[[int], _Rank]) -> None:
        self._begin = begin
        self.all: list[_Rank] = []
        self.running: dict[int, _Rank] = {}
        self._killed: set[int] = set()

    def start(self, rank: int) -> bool:
        """Starts a rank; false where it runs."""
        if rank in self.running:
            return False
        self.running[rank] = self._begin(rank)
        self.all.append(self.running[rank])
        return True

    def kill(self, rank: int) -> bool:
        """Kills a rank, which is then no failure; false where it does not run."""
        if rank not in self.running:
            return False
        self._killed.add(rank)
        os.killpg(self.running[rank].process.pid, signal.SIGKILL)
        return True

    def ended(self, rank: int) -> bool:
        """Notes that a rank has; whether it was killed."""
        del self.running[rank]
        killed = rank in self._killed
        self._killed.discard(rank)
        return killed


# A rank, and a line of its output or its exit code.
_Events: TypeAlias = "queue.SimpleQueue[tuple[int, str | int]]"


def launch(
    cluster: Cluster,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[int, str], None] | None = None,
    timeout: float | None = None,
) -> None:
    """Runs `command` on every rank and blocks until all have ended.

    The first rank to fail ends the run with a `LabError`; so does `timeout`, in seconds
    from when the cluster stands. `on_line` gets every line of output with its rank, in
    the calling thread; by default lines are printed. What the cluster's timetable says
    happens meanwhile; a rank that it kills is no failure. Whatever happens, no process
    and no network outlives the call, nor the caller.
    """
    env = env or {}
    if not command or not shutil.which(command[0], path=env.get("PATH")):
        raise ValueError(f"{' '.join(command[:1])!r} is no command: put one after --")
    show = on_line or line_printer()
    tails = [deque[str](maxlen=_TAIL) for _ in range(cluster.size)]

    def follow(rank: int, event: str | int) -> None:
        if isinstance(event, str):
            tails[rank].append(event)
            show(rank, event)

    events: _Events = queue.SimpleQueue()
    with networks(cluster) as enter:
        with _ranks(cluster, enter, command, env, events) as ranks:
            timetable = Timetable(cluster, enter, ranks, say)
            end = _until_first_failure(events, ranks, timetable, follow, timeout)
        while not events.empty():
            follow(*events.get())
    if end is None:
        raise LabError(f"the run did not end within {timeout:g} seconds")
    rank, code = end
    if code:
        ending = f"failed with exit code {code}"
        if code < 0:
            ending = f"was killed by {signal.Signals(-code).name}"
        raise LabError(f"rank {rank} {ending}", rank, code, _last_words(tails[rank]))


def outliving(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A shell that outlives even SIGKILL of this process, when its input ends."""
    return subprocess.Popen(
        ["sh", "-c", script, "sh", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def say(words: str) -> None:
    """What the lab itself has to say, beside what ranks do."""
    print(words, file=sys.stderr, flush=True)


def line_printer() -> Callable[[int, str], None]:
    """Prints lines as `[rank 3] text`, each rank in its colour on a terminal."""
    console = Console(highlight=False, soft_wrap=True)

    def show(rank: int, text: str) -> None:
        prefix = (f"[rank {rank}] ", _COLOURS[rank % len(_COLOURS)])
        console.print(Text.assemble(prefix, Text.from_ansi(text)))

    return show


@contextmanager
def _ranks(
    cluster: Cluster,
    enter: Enter,
    command: Sequence[str],
    env: Mapping[str, str],
    events: _Events,
) -> Iterator[_Ranks]:
    """Starts the ranks; at the end none of their process groups is left.

    Invariant: no rank is reaped before the guard has killed the groups; until then
    nothing else can have got a group's id.
    """
    guard = outliving(_GUARD)
    environments = list(_environments(cluster, env))

    def begin(rank: int) -> _Rank:
        words = [*enter(rank // cluster.ranks_per_host), *command]
        begun = _start(rank, words, environments[rank], events)
        print(begun.process.pid, file=guard.stdin, flush=True)
        return begun

    ranks = _Ranks(begin)
    try:
        for rank in range(cluster.size):
            ranks.start(rank)
        yield ranks
    finally:
        try:
            _terminate(ranks.all)
        finally:
            guard.communicate()
            for process, reader, waiter in ranks.all:
                waiter.join()
                process.wait()
                reader.join(1.0)  # a daemon of the command's may hold its output


# What a rank's environment has unless the caller's says otherwise.
DEFAULTS = {
    # The ranks share this machine's cores: threads of one would stall the others.
    "OMP_NUM_THREADS": "1",
    # glibc gives large blocks back as soon as they are free, and every step then pays
    # for fresh pages: a quarter of a small model's step, under DDP and here alike.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),  # the largest it takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 29),
}


def _environments(cluster: Cluster, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    port = PORT
    if cluster.rate is None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    base = {**DEFAULTS, **os.environ}
    for rank in range(cluster.size):
        yield {**base, **rank_environment(cluster, rank, port), **env}


def _start(
    rank: int, words: Sequence[str], variables: Mapping[str, str], events: _Events
) -> _Rank:
    process = subprocess.Popen(
        words,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                events.put((rank, line.rstrip("\n")))

    def wait() -> None:
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        sign = 1 if end.si_code == os.CLD_EXITED else -1
        events.put((rank, sign * end.si_status))

    threads = [threading.Thread(target=work, daemon=True) for work in (read, wait)]
    for thread in threads:
        thread.start()
    return _Rank(process, *threads)


def _until_first_failure(
    events: _Events,
    ranks: _Ranks,
    timetable: Timetable,
    follow: Callable[[int, str | int], None],
    timeout: float | None,
) -> tuple[int, int] | None:
    """The first rank whose exit is not 0, else the last; None when time ran out."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        timetable.go()
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        waits = [wait for wait in (left, timetable.wait) if wait is not None]
        try:
            rank, event = events.get(timeout=min(waits, default=None))
        except queue.Empty:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            continue
        follow(rank, event)
        if isinstance(event, int):
            killed = ranks.ended(rank)
            code = 0 if killed else event
            begins = killed and timetable.starts
            if code or not (ranks.running or begins):
                return rank, code


def _terminate(ranks: Sequence[_Rank]) -> None:
    """Asks the ranks to end, and gives them time to."""
    for process, _, _ in ranks:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    # A rank has ended when nobody holds its output any more: behind nsenter the
    # command itself may outlive the process that stands for it here.
    for _, reader, _ in ranks:
        reader.join(max(deadline - time.monotonic(), 0.0))


def _last_words(tail: Sequence[str]) -> list[str]:
    """The last lines, from where the first traceback among them begins."""
    lines = list(tail)
    starts = (n for n, text in enumerate(lines) if text.startswith("Traceback"))
    return lines[next(starts, max(len(lines) - 20, 0)) :]
