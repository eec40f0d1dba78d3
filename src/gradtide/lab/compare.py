"""The side-by-side comparison, from what was typed to what is left in the folder.

Checks everything that can be known beforehand, starts a worker on every rank of an
emulated cluster (or is one of torchrun's ranks itself), and reports.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

from gradtide.lab.cluster import Cluster
from gradtide.lab.launch import LabError, launch
from gradtide.lab.record import Record, command_line, commit, machine, versions
from gradtide.lab.report import table, write
from gradtide.lab.spec import Spec, check
from gradtide.lab.worker import PROGRESS, Outcome, Report, measure, outcome, run

# c10d warns that hosts of the lab have no names: they have none to have.
_ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def compare(spec: Spec, out: Path, argv: Sequence[str]) -> None:
    """Compare on an emulated cluster; `argv` is what the record says was typed.

    Raises ValueError before anything starts, and LabError when a rank failed.
    """
    cluster = Cluster(spec.hosts, spec.ranks_per_host, spec.rate)
    check(spec)
    _make(out)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="gradtide-") as folder:
        asked, answer = Path(folder, "spec.json"), Path(folder, "outcome.json")
        asked.write_text(spec.dumps(), encoding="utf-8")
        worker = ["-m", "gradtide.lab.worker", str(asked), str(answer)]
        with _progress(spec, console) as report, _without_progress():
            launch(
                cluster,
                [sys.executable, *worker],
                env=_ENVIRONMENT,
                on_line=lambda rank, line: _follow(rank, line, report, console),
            )
        found = outcome(answer.read_text(encoding="utf-8"))
    _conclude(spec, found, out, argv, console)


def compare_here(spec: Spec, out: Path, argv: Sequence[str], rank: int) -> None:
    """Compare as one of torchrun's ranks; rank 0 reports.

    Raises ValueError before anything starts; a later failure ends this process.
    """
    check(spec)
    if rank == 0:
        _make(out)
    run(lambda: _join(spec, out, argv, rank))


def _join(spec: Spec, out: Path, argv: Sequence[str], rank: int) -> None:
    if rank != 0:
        measure(spec, lambda name: None)
        return
    console = Console()
    with _progress(spec, console) as report:
        found = measure(spec, report)
    assert found is not None
    _conclude(spec, found, out, argv, console)


def _conclude(
    spec: Spec, found: Outcome, out: Path, argv: Sequence[str], console: Console
) -> None:
    record = Record(
        command=command_line(argv),
        commit=commit(),
        versions=versions(),
        machine=machine(),
        workload=spec.workload,
        hosts=spec.hosts,
        ranks_per_host=spec.ranks_per_host,
        rate_bits_per_s=spec.rate,
        steps=spec.steps,
        results=found.results,
    )
    console.print(table(record, found.facts, console.width))
    write(out, record, found)
    console.print(f"record.json, table.txt, chart.png, trace.json are in {out}")


def _make(out: Path) -> None:
    """The folder, in which a file can be written; ValueError where it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be written to ({error.strerror}): choose another"
        ) from error


@contextmanager
def _progress(spec: Spec, console: Console) -> Iterator[Report]:
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

        def report(name: str) -> None:
            if name in done:
                done[name] += 1
            here = f"{name}, step {done.get(name, 0)}/{num_steps}"
            bar.update(task, completed=sum(done.values()), description=here)

        yield report


@contextmanager
def _without_progress() -> Iterator[None]:
    """Failures tell what a rank has printed last: not how far it had come."""
    try:
        yield
    except LabError as error:
        lines = [line for line in error.lines if not line.startswith(PROGRESS)]
        raise LabError(error.what, error.rank, error.code, lines) from None


def _follow(rank: int, line: str, report: Report, console: Console) -> None:
    if line.startswith(PROGRESS):
        report(line.removeprefix(PROGRESS))
    else:
        console.print(Text(f"[rank {rank}] {line}"))
