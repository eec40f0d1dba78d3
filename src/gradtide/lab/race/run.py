"""The race, from what was typed to what is left in the folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from gradtide.lab.cluster import Cluster
from gradtide.lab.contest import as_rank, bar, on_cluster
from gradtide.lab.job import Tell
from gradtide.lab.outputs import check_folder
from gradtide.lab.race import laps
from gradtide.lab.race.report import RaceRecord, table, write
from gradtide.lab.race.spec import RaceSpec, check
from gradtide.lab.race.standings import Point, standings
from gradtide.lab.record import origin


def race(spec: RaceSpec, out: Path, argv: Sequence[str]) -> None:
    """Race on an emulated cluster; `argv` is what the record says was typed.

    Raises ValueError before anything starts, and LabError when a rank failed.
    """
    cluster = Cluster(spec.hosts, spec.ranks_per_host, spec.rate)
    check(spec)
    check_folder("--out", out)
    console = Console()
    found = on_cluster(cluster, laps.run, spec, console, _progress(spec, console))
    _conclude(spec, found, out, argv, console)


def race_here(spec: RaceSpec, out: Path, argv: Sequence[str], rank: int) -> None:
    """Race as one of torchrun's ranks; rank 0 reports.

    Raises ValueError before anything starts; a later failure ends this process.
    """
    check(spec)
    if rank == 0:
        check_folder("--out", out)
    console = Console()

    def conclude(found: dict[str, list[Point]]) -> None:
        _conclude(spec, found, out, argv, console)

    as_rank(rank, laps.run, spec, _progress(spec, console), conclude)


def _conclude(
    spec: RaceSpec,
    found: dict[str, list[Point]],
    out: Path,
    argv: Sequence[str],
    console: Console,
) -> None:
    record = RaceRecord(origin(argv), spec, standings(found))
    console.print(table(record))
    out.mkdir(parents=True, exist_ok=True)
    write(out, record)
    console.print(f"record.json, table.txt, race.png are in {out}")


@contextmanager
def _progress(spec: RaceSpec, console: Console) -> Iterator[Tell]:
    """A bar over the seconds of all contestants, with the one that trained last."""
    with bar(console, spec.seconds * len(spec.schemes)) as advance:

        def tell(words: str) -> None:
            done, _, name = words.partition(" ")
            advance(name, float(done))

        yield tell
