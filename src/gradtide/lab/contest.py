"""Where a comparison or a race is held: on an emulated cluster, or by torchrun's ranks.

Knows how ranks are started and watched; knows nothing of what they measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

from gradtide.lab.cluster import Cluster
from gradtide.lab.job import Tell, at_once, on_every_rank, passed_on, silent

T = TypeVar("T")
# What is told, and how much of the whole is then done.
Advance: TypeAlias = Callable[[str, float], None]


def on_cluster(
    cluster: Cluster,
    measure: Callable[..., T | None],
    spec: Any,
    console: Console,
    progress: AbstractContextManager[Tell],
) -> T:
    """Have every rank of an emulated cluster call `measure(spec, tell)`.

    Returns what rank 0 found. Raises LabError when a rank failed.
    """

    def show(rank: int, line: str) -> None:
        console.print(Text(f"[rank {rank}] {line}"))

    with progress as tell:
        return on_every_rank(cluster, measure, spec, passed_on, tell=tell, show=show)


def as_rank(
    rank: int,
    measure: Callable[..., T | None],
    spec: Any,
    progress: AbstractContextManager[Tell],
    conclude: Callable[[T], None],
) -> None:
    """Call `measure(spec, tell)` as one of torchrun's ranks; rank 0 concludes.

    A failure ends this process.
    """

    def work() -> None:
        with nullcontext(silent) if rank else progress as tell:
            found = measure(spec, tell)
        if found is not None:
            conclude(found)

    at_once(work)


@contextmanager
def bar(console: Console, total: float, *columns: Any) -> Iterator[Advance]:
    """A bar that is gone at the end; `columns` say more between it and the time."""
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        Elapsed(),
        console=console,
        transient=True,
    )
    with shown:
        task = shown.add_task("starting", total=total)

        def advance(words: str, done: float) -> None:
            shown.update(task, completed=done, description=words)

        yield advance
