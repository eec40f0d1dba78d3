"""The race, from what was typed to what is left in the folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from gradtide.lab.contest import bar, hold
from gradtide.lab.job import Tell
from gradtide.lab.race import laps
from gradtide.lab.race.report import RaceRecord, table, write
from gradtide.lab.race.standings import Point, standings
from gradtide.lab.record import origin
from gradtide.lab.spec import RaceSpec, check_race


def race(
    spec: RaceSpec, out: Path, argv: Sequence[str], rank: int | None = None
) -> None:
    """Race on an emulated cluster, or as one of torchrun's ranks (`hold`)."""
    hold(spec, out, argv, rank, check_race, laps.run, _progress, _conclude)


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
