"""The side-by-side comparison, from what was typed to what is left in the folder.

Checks everything that can be known beforehand, measures on every rank of an emulated
cluster (or is one of torchrun's ranks itself), and reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

from gradtide.lab.cluster import Cluster
from gradtide.lab.job import Tell, at_once, on_every_rank, passed_on, silent
from gradtide.lab.outputs import check_folder
from gradtide.lab.record import Record, origin
from gradtide.lab.report import table, write
from gradtide.lab.spec import Spec, check
from gradtide.lab.worker import Outcome, measure


def compare(spec: Spec, out: Path, argv: Sequence[str]) -> None:
    """Compare on an emulated cluster; `argv` is what the record says was typed.

    Raises ValueError before anything starts, and LabError when a rank failed.
    """
    cluster = Cluster(spec.hosts, spec.ranks_per_host, spec.rate)
    check(spec)
    check_folder("--out", out)
    console = Console()

    def show(rank: int, line: str) -> None:
        console.print(Text(f"[rank {rank}] {line}"))

    with _progress(spec, console) as tell:
        found = on_every_rank(cluster, measure, spec, passed_on, tell=tell, show=show)
    _conclude(spec, found, out, argv, console)


def compare_here(spec: Spec, out: Path, argv: Sequence[str], rank: int) -> None:
    """Compare as one of torchrun's ranks; rank 0 reports.

    Raises ValueError before anything starts; a later failure ends this process.
    """
    check(spec)
    if rank == 0:
        check_folder("--out", out)
    console = Console()

    def work() -> None:
        with nullcontext(silent) if rank else _progress(spec, console) as tell:
            found = measure(spec, tell)
        if found is not None:
            _conclude(spec, found, out, argv, console)

    at_once(work)


def _conclude(
    spec: Spec, found: Outcome, out: Path, argv: Sequence[str], console: Console
) -> None:
    record = Record(
        **origin(argv),
        workload=spec.workload,
        hosts=spec.hosts,
        ranks_per_host=spec.ranks_per_host,
        rate_bits_per_s=spec.rate,
        steps=spec.steps,
        results=found.results,
    )
    console.print(table(record, found.facts, console.width))
    out.mkdir(parents=True, exist_ok=True)
    write(out, record, found)
    console.print(f"record.json, table.txt, chart.png, trace.json are in {out}")


@contextmanager
def _progress(spec: Spec, console: Console) -> Iterator[Tell]:
    """A bar over the steps of all contestants, with the one whose turn it is."""
    num_steps = spec.warmup + spec.steps + spec.rounds
    done = dict.fromkeys(spec.schemes, 0)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Elapsed(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=num_steps * len(done))

        def tell(name: str) -> None:
            if name in done:
                done[name] += 1
            here = f"{name}, step {done.get(name, 0)}/{num_steps}"
            bar.update(task, completed=sum(done.values()), description=here)

        yield tell
