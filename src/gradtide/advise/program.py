"""Starts a program that is recorded, waits for its trace, and ends all of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gradtide.advise.notes import VARIABLE, Notes, Told, Wanted
from gradtide.advise.recorder import PATIENCE
from gradtide.planner.trace import StepTrace

# Torchrun's variables, for want of which a script fails that is started without it.
TORCHRUN = re.compile(
    r"\b((LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT))\b"
)
GRACE = 3.0  # seconds between SIGTERM and SIGKILL
REMEDY = (
    "Write a function that builds model, optimizer and loss, and trace that:\n"
    "    gradtide profile trace mypkg.train:build --out trace.json\n"
    "    gradtide plan --trace trace.json --ranks 8 --rate 1gbit"
)


class NotRecorded(Exception):
    """There is no trace; says what was seen, and what can be done. `code` to exit by.

    That is the program's own, where it failed by itself.
    """

    def __init__(self, words: str, code: int = 1) -> None:
        super().__init__(words)
        self.code = code


def record(
    command: Sequence[str],
    environment: Mapping[str, str],
    wanted: Wanted,
    seconds: float,
) -> tuple[StepTrace, Told]:
    """Run a command, with the start-up hook in its environment, for a few steps.

    One that fails for want of torchrun's variables is run again, as one rank of one.
    What it prints goes to this process's stderr. Raises NotRecorded. Nothing that was
    started outlives the call.
    """
    try:
        return _recorded(command, environment, wanted, seconds)
    except _NoRank as error:
        print(
            f"gradtide: {error}: it is to be started by torchrun. It is run again, as "
            "one rank of one",
            file=sys.stderr,
        )
    return _recorded(command, {**environment, **_alone()}, wanted, seconds)


class _NoRank(Exception):
    """A program ended as a variable of torchrun's is not set; says with which error."""


def _alone() -> dict[str, str]:
    """What torchrun tells the one rank of a job."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    told = {name: str(number) for name, number in {**ranks, **sizes}.items()}
    return {**told, "MASTER_ADDR": "127.0.0.1"}


def _recorded(
    command: Sequence[str],
    environment: Mapping[str, str],
    wanted: Wanted,
    seconds: float,
) -> tuple[StepTrace, Told]:
    with tempfile.TemporaryDirectory(prefix="gradtide_advise_") as folder:
        notes = Notes(folder)
        notes.ask(wanted)
        sys.stderr.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # this process's stderr
            env={**environment, VARIABLE: folder},
            start_new_session=True,
        )
        try:
            over = _followed(process, notes, seconds)
        finally:
            _end(process, folder)
        if notes.finished:
            return notes.found()
        if over:
            raise NotRecorded(_slow(notes, wanted, seconds))
        raised = notes.stage("raised") or ""
        if "RANK" not in environment and TORCHRUN.search(raised):
            raise _NoRank(raised.splitlines()[0])
        raise _ended(notes, wanted, process.returncode)


def _followed(process: subprocess.Popen[bytes], notes: Notes, seconds: float) -> bool:
    """Wait for the trace, and for the program's own end; whether time was over."""
    end = time.monotonic() + seconds
    seen = None
    while process.poll() is None:
        if seen is None and notes.finished:
            seen = time.monotonic()
        if seen is not None and time.monotonic() > seen + PATIENCE + GRACE:
            return False  # a launcher that goes on by itself
        if seen is None and time.monotonic() > end:
            return True
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    """End what is left of the program, whoever started it: all have the variable."""
    mark = f"{VARIABLE}={folder}".encode()
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = list(_marked(mark))
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if process.poll() is None:
            process.send_signal(number)
        end = time.monotonic() + GRACE
        while time.monotonic() < end and (process.poll() is None or [*_marked(mark)]):
            time.sleep(0.05)


def _marked(mark: bytes) -> Iterator[int]:
    """Processes with a variable in the environment that they were started with."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


# - Words ------------------------------------------------------------------------------


def _slow(notes: Notes, wanted: Wanted, seconds: float) -> str:
    return (
        f"the program was ended after {seconds:g} s: {_seen(notes, wanted)}. Give it "
        f"longer, as by --seconds {5 * seconds:g}, or smaller steps.\n{REMEDY}"
    )


def _ended(notes: Notes, wanted: Wanted, code: int) -> NotRecorded:
    failed = notes.stage("failed")
    if failed is not None:
        return NotRecorded(f"{failed.rstrip()}\n{REMEDY}")
    if code:
        how = (
            f"failed with exit code {code}" if code > 0 else f"ended by signal {-code}"
        )
        words = f"the program {how}: {_seen(notes, wanted)}. What it said is above"
        return NotRecorded(words, code if code > 0 else 128 - code)
    words = f"the program ended by itself: {_seen(notes, wanted)}"
    return NotRecorded(f"{words}.\n{REMEDY}")


def _seen(notes: Notes, wanted: Wanted) -> str:
    """How far a program has come, by its last stage."""
    steps, forward = notes.stage("steps"), notes.stage("forward")
    if steps is not None:
        needed = 2 + wanted.warmup + wanted.steps
        return f"{steps} steps of optimizers were seen, and {needed} are needed"
    if forward is not None:
        return f"{forward} was called with gradients, and no optimizer of torch stepped"
    if notes.stage("torch") is not None:
        return (
            "torch was imported, and no module was called with gradients (nothing sees "
            "a module's calls after module.compile(): take torch.compile(module))"
        )
    return "no Python that it started has imported torch, or it runs elsewhere"
