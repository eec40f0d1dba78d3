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
    the calling thread; by default lines are printed. Whatever happens, no process and
    no network outlives the call, nor the caller.
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
        with _ranks(cluster, enter, command, env, events):
            end = _until_first_failure(events, cluster.size, follow, timeout)
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
) -> Iterator[None]:
    """Starts the ranks; at the end none of their process groups is left.

    Invariant: no rank is reaped before the guard has killed the groups; until then
    nothing else can have got a group's id.
    """
    guard = outliving(_GUARD)
    ranks: list[_Rank] = []
    try:
        for rank, variables in enumerate(_environments(cluster, env)):
            words = [*enter(rank // cluster.ranks_per_host), *command]
            ranks.append(_start(rank, words, variables, events))
            print(ranks[-1].process.pid, file=guard.stdin, flush=True)
        yield
    finally:
        try:
            _terminate(ranks)
        finally:
            guard.communicate()
            for process, reader, waiter in ranks:
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
    size: int,
    follow: Callable[[int, str | int], None],
    timeout: float | None,
) -> tuple[int, int] | None:
    """The first rank whose exit is not 0, else the last; None when time ran out."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            rank, event = events.get(timeout=left)
        except queue.Empty:
            return None
        follow(rank, event)
        if isinstance(event, int):
            size -= 1
            if event or size == 0:
                return rank, event


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
