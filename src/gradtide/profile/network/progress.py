"""What a measurement is at, while it runs: from rank 0 to a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gradtide.lab.failure import LabError
from gradtide.lab.worker import PROGRESS

Tell = Callable[[str], None]


def silent(words: str) -> None:
    """Tell nobody."""


def passed_on(words: str) -> None:
    """From a rank to the process that has started it."""
    print(f"{PROGRESS}{words}", flush=True)


@contextmanager
def shown(seconds: float) -> Iterator[Tell]:
    """A line on standard error, while there is a terminal; gone at the end."""
    spinner = Progress(
        SpinnerColumn(),
        TimeElapsedColumn(),
        TextColumn(f"of about {seconds:g} s  {{task.description}}"),
        console=Console(stderr=True),
        transient=True,
    )
    with spinner:
        task = spinner.add_task("starting")
        yield lambda words: spinner.update(task, description=words)


def follow(tell: Tell) -> Callable[[int, str], None]:
    """For lines of ranks: tells what was passed on."""

    def line(rank: int, text: str) -> None:
        if text.startswith(PROGRESS):
            tell(text.removeprefix(PROGRESS))

    return line


@contextmanager
def without_progress() -> Iterator[None]:
    """Failures tell what a rank has printed last: not what it was at."""
    try:
        yield
    except LabError as error:
        lines = [line for line in error.lines if not line.startswith(PROGRESS)]
        raise LabError(error.what, error.rank, error.code, lines) from None
