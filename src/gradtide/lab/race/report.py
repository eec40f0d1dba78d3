"""What a race shows and leaves behind: table, record and picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from gradtide.lab.race.picture import draw
from gradtide.lab.race.standings import Point, Standing, target
from gradtide.lab.rate import format_rate
from gradtide.lab.record import milliseconds
from gradtide.lab.spec import RaceSpec
from gradtide.lab.tables import folded, grid, number

WIDTH = 120  # columns of table.txt
HEADINGS = ("steps", "ms", "loss", "there", "x", "MB then", "MB")


@dataclass(frozen=True)
class RaceRecord:
    """Everything that `record.json` says: where it comes from, what was asked, found.

    Bytes are those that one rank sent.
    """

    origin: dict[str, Any]
    spec: RaceSpec
    standings: list[Standing]

    @property
    def target(self) -> float:
        """The loss that was raced to: the lowest of the first contestant."""
        return target(self.standings[0].points)

    def dumps(self) -> str:
        spec = self.spec
        fields = {
            **self.origin,
            "workload": spec.workload,
            "hosts": spec.hosts,
            "ranks_per_host": spec.ranks_per_host,
            "rate_bits_per_s": spec.rate,
            **({"local_rate_bits_per_s": spec.local_rate} if spec.local_rate else {}),
            "seconds": spec.seconds,
            "every": spec.every,
            "seed": spec.seed,
            "target_loss": self.target,
            "results": [_fields(each) for each in self.standings],
        }
        return json.dumps(fields, indent=2) + "\n"


def speedup(first: Standing, other: Standing) -> float | None:
    """How many times sooner `other` was there than `first`; None if it never was."""
    if first.arrival is None or other.arrival is None:
        return None
    return first.arrival.seconds / other.arrival.seconds


def table(record: RaceRecord) -> Group:
    """The race as text, below lines that say what was raced to and what it is worth."""
    schemes = [each.scheme for each in record.standings]
    rows = grid(folded("scheme", schemes), *map(number, HEADINGS))
    first = record.standings[0]
    for each in record.standings:
        ratio, there = speedup(first, each), each.arrival
        rows.add_row(
            each.scheme,
            str(each.last.steps),
            milliseconds(each.last.seconds / each.last.steps),
            f"{each.last.loss:.3f}",
            f"{there.seconds:.1f}" if there else "-",
            f"{ratio:.2f}" if ratio else "-",
            f"{there.sent_bytes / 1e6:.3g}" if there else "-",
            f"{each.last.sent_bytes / 1e6:.3g}",
        )
    said = (
        "there: seconds until it first had that loss; MB: sent by a rank, and by then"
    )
    return Group(*map(Text, [*preface(record), said]), rows)


def preface(record: RaceRecord) -> list[str]:
    """The lines above the table and above the picture."""
    spec = record.spec
    rate = "links not shaped" if spec.rate is None else f"{format_rate(spec.rate)}/s"
    return [
        f"{spec.workload} on {spec.hosts} hosts x {spec.ranks_per_host} ranks, {rate}; "
        f"{spec.seconds:g} s of training each, a look every {spec.every} steps",
        f"raced to: held-out loss {record.target:.4g}, the lowest of "
        f"{record.standings[0].scheme}; one seed, constant learning rate",
    ]


def write(out: Path, record: RaceRecord) -> None:
    """`record.json`, `table.txt` and `race.png` into `out`."""
    (out / "record.json").write_text(record.dumps(), encoding="utf-8")
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=WIDTH).print(table(record))
    first = record.standings[0]
    labels = [_label(each, speedup(first, each)) for each in record.standings]
    draw(record.standings, labels, record.target, preface(record), out / "race.png")


def _label(standing: Standing, ratio: float | None) -> str:
    if standing.arrival is None or ratio is None:
        return f"{standing.scheme}: not there"
    return f"{standing.scheme}: {standing.arrival.seconds:.1f} s, {ratio:.2f} x"


def _fields(standing: Standing) -> dict[str, Any]:
    """A row of the record; the course is a list for each of its quantities."""
    there = standing.arrival
    columns = zip(Point._fields, zip(*standing.points, strict=True), strict=True)
    return {
        "scheme": standing.scheme,
        "seconds_to_target": there and there.seconds,
        "sent_bytes_to_target": there and there.sent_bytes,
        "course": {name: list(values) for name, values in columns},
    }
