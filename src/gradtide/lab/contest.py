"""Where a comparison or a race is held: on an emulated cluster, or by torchrun's ranks.

Knows how ranks are started and watched; knows nothing of what they measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

from gradtide.lab.checks import check_folder
from gradtide.lab.job import Tell, at_once, on_every_rank, passed_on, silent
from gradtide.lab.spec import Place

S = TypeVar("S", bound=Place)
T = TypeVar("T")
# What is told, and how much of the whole is then done.
Advance: TypeAlias = Callable[[str, float], None]


def hold(
    spec: S,
    out: Path,
    argv: Sequence[str],
    rank: int | None,
    check: Callable[[S], None],
    measure: Callable[..., T | None],
    progress: Callable[[S, Console], AbstractContextManager[Tell]],
    conclude: Callable[[S, T, Path, Sequence[str], Console], None],
) -> None:
    """Measure on an emulated cluster, or as the `rank` that torchrun has started.

    `check` raises ValueError for a specification that cannot be; `measure` is what each
    rank calls, and returns something on rank 0 alone, which `conclude` writes down.
    `argv` is what the record says was typed. Raises ValueError before anything starts,
    and LabError when an emulated rank failed; as one of torchrun's ranks a later
    failure ends this process.
    """
    cluster = spec.cluster if rank is None else None
    check(spec)
    if not rank:
        check_folder("--out", out)
    console = Console()
    shown = nullcontext(silent) if rank else progress(spec, console)

    def show(rank: int, line: str) -> None:
        console.print(Text(f"[rank {rank}] {line}"))

    def work() -> None:
        with shown as tell:
            if cluster is None:
                found = measure(spec, tell)
            else:
                found = on_every_rank(
                    cluster, measure, spec, passed_on, tell=tell, show=show
                )
        if found is not None:
            out.mkdir(parents=True, exist_ok=True)
            conclude(spec, found, out, argv, console)

    if cluster is None:
        at_once(work)
    else:
        work()


QUIET = 5.0  # seconds between two lines of progress


def _lines(console: Console, total: float) -> Advance:
    start = told = time.monotonic()
    console.print("starting", highlight=False)

    def advance(words: str, done: float) -> None:
        nonlocal told
        if (now := time.monotonic()) - told >= QUIET:
            told, share = now, 100 * done / total
            line = f"{now - start:.0f} s: {share:.0f} % done, {words}"
            console.print(line, highlight=False, soft_wrap=True)

    return advance


@contextmanager
def bar(console: Console, total: float, *columns: Any) -> Iterator[Advance]:
    """A bar that is gone at the end; `columns` say more between it and the time.

    Where nobody sees it move, as in a file, a line every few seconds.
    """
    if not console.is_terminal:
        yield _lines(console, total)
        return
    parts = TextColumn("{task.description}"), BarColumn(), *columns, Elapsed()
    with Progress(*parts, console=console, transient=True) as shown:
        task = shown.add_task("starting", total=total)
        yield lambda words, done: shown.update(task, completed=done, description=words)
