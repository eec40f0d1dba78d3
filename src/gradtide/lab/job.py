"""What every rank of a job does, from its process group to the answer that comes back.

[Note: Pinned] `torch.distributed.nn.functional` has the default group among the default
arguments of its functions, as it is when the module is imported; building an optimizer
imports it. A group made before that outlives its end, and so do its threads: one that
lets go of a tensor while the interpreter ends aborts the process. (Guard:
tests/lab/test_job.py.)

[Note: Idle] DDP's reducer has the group, and ends its threads when it is freed; the
interpreter's lock is held meanwhile. A thread that lets go of a tensor just then waits
for that lock, and both wait for ever. So threads get the time to become idle before
anything that has the group is freed. (Seen on a machine with ten times the work that it
has cores for.)
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch.distributed as dist

from gradtide.lab.cluster import Cluster, LabError, Unfit
from gradtide.lab.launch import launch, line_printer, outliving

IDLE = 0.2  # seconds
PROGRESS = "gradtide-progress "  # before words that a rank passes on
# With `-m`, as with `-c`, modules in the current folder come before all others, until
# the empty entry is taken off. Python's own option against that (-P) is new in 3.11.
_START = """import sys
sys.path[:] = filter(None, sys.path)
from gradtide.lab.job import main
main(*sys.argv[1:])"""
# When its input ends it removes the folder.
_SWEEP = 'cat; rm -rf -- "$1"'

T = TypeVar("T")
Tell: TypeAlias = Callable[[str], None]


def silent(words: str) -> None:
    """Tell nobody."""


def passed_on(words: str) -> None:
    """Tell the process that has started this rank."""
    print(f"{PROGRESS}{words}", flush=True)


def on_every_rank(
    cluster: Cluster,
    work: Callable[..., T | None],
    *arguments: object,
    tell: Tell = silent,
    show: Callable[[int, str], None] | None = None,
) -> T:
    """Start a cluster whose ranks call `work(*arguments)`; what rank 0's call returns.

    `tell` gets what ranks pass on, `show` every other line of theirs with its rank; by
    default these are printed. Raises LabError when a rank fails.
    """
    show_line = show or line_printer()

    def follow(rank: int, line: str) -> None:
        if line.startswith(PROGRESS):
            tell(line.removeprefix(PROGRESS))
        else:
            show_line(rank, line)

    paths = [os.environ.get("PYTHONPATH"), *sys.path]
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # c10d warns that hosts of the lab have no names: they have none to have.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    with _scratch() as folder:
        asked, answer = folder / "asked", folder / "answer"
        asked.write_bytes(pickle.dumps((work, arguments)))
        command = [sys.executable, "-c", _START, str(asked), str(answer)]
        try:
            launch(cluster, command, env=environment, on_line=follow)
        except LabError as error:
            # Failures tell what a rank has printed last: not how far it had come.
            lines = [line for line in error.lines if not line.startswith(PROGRESS)]
            raise LabError(error.what, error.rank, error.code, lines) from None
        found: T = pickle.loads(answer.read_bytes())
        return found


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that is gone afterwards, however this process ends."""
    with tempfile.TemporaryDirectory(prefix="gradtide-") as folder:
        sweeper = outliving(_SWEEP, folder)
        try:
            yield Path(folder)
        finally:
            sweeper.communicate()


def at_once(work: Callable[[], None]) -> None:
    """Do `work`; a failure ends this process at once, whatever its threads wait for."""
    try:
        work()
    except BaseException as error:
        # An orderly exit would join queues whose peers may never answer.
        if isinstance(error, Unfit):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)


@contextmanager
def joined(backend: str | None = "gloo") -> Iterator[tuple[int, int]]:
    """The default process group, whose threads end with it; gives rank and size.

    A failure leaves it as it is: nobody waits for the end of a rank that failed.
    """
    importlib.import_module("torch.distributed.nn.functional")  # see [Note: Pinned]
    dist.init_process_group(backend)
    yield dist.get_rank(), dist.get_world_size()
    time.sleep(IDLE)  # see [Note: Idle]
    dist.destroy_process_group()


def gathered(own: T) -> list[T] | None:
    """Everybody's, by rank, on rank 0; None elsewhere."""
    found = [own] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, found)
    return found


def from_everybody(own: T) -> list[T]:
    """What each rank gives, by rank; a collective call."""
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def main(asked: str, answer: str) -> None:
    """What every rank runs: the work in one file; what comes of it into the other."""

    def answered() -> None:
        work, arguments = pickle.loads(Path(asked).read_bytes())
        found = work(*arguments)
        if found is not None:
            Path(answer).write_bytes(pickle.dumps(found))

    at_once(answered)
