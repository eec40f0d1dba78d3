"""A race, from what was typed to what it shows and leaves: table, record, picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from gradtide.lab.chart import COLOURS, GREY, PALE, finish
from gradtide.lab.contest import bar, hold
from gradtide.lab.job import Tell
from gradtide.lab.race import laps
from gradtide.lab.race.standings import Point, Standing, falling, standings, target
from gradtide.lab.record import milliseconds, origin
from gradtide.lab.spec import RaceSpec, check_race
from gradtide.lab.tables import folded, grid, number

NOTED = 2  # stalled laps of a contestant
WIDTH = 120  # columns of table.txt
# Of a record, what is there only where it was asked for.
OPTIONAL = {"local_rate_bits_per_s", "internet", "device"}
SHOWN = 0.4  # of the way down to the target; in the picture, above all fall alike
_ALONG: dict[str, Callable[[Point], float]] = {
    "seconds of training": lambda then: then.seconds,
    "megabytes sent by a rank": lambda then: then.sent_bytes / 1e6,
}
HEADINGS = ("steps", "ms", "lowest", "there", "times sooner", "MB then")


def race(
    spec: RaceSpec,
    out: Path,
    argv: Sequence[str],
    rank: int | None = None,
    resume: bool = False,
) -> None:
    """Race on an emulated cluster, or as one of torchrun's ranks (`hold`).

    With `resume` those who are in the record that `out` has stay in it, and do not
    train again.
    """
    if resume and not rank:
        spec = resumed(spec, out / "record.json")
    hold(spec, out, argv, rank, check_race, laps.run, progress, conclude)


def conclude(
    spec: RaceSpec,
    found: dict[str, list[Point]],
    out: Path,
    argv: Sequence[str],
    console: Console,
) -> None:
    everybody = spec.courses | found
    courses = {name: everybody[name] for name in spec.schemes} | everybody
    record = RaceRecord(origin(argv), spec, standings(courses, spec.leader))
    console.print(table(record))
    write(out, record)
    console.print(f"record.json, table.txt, race.png are in {out}")


@contextmanager
def progress(spec: RaceSpec, console: Console) -> Iterator[Tell]:
    """A bar over the seconds of all contestants, with the one that trained last."""
    with bar(console, spec.seconds * len(spec.missing)) as advance:

        def tell(words: str) -> None:
            done, _, name = words.partition(" ")
            advance(name, float(done))

        yield tell


@dataclass(frozen=True)
class RaceRecord:
    """Everything that `record.json` says: where it comes from, what was asked, found.

    Bytes are those that one rank sent.
    """

    origin: dict[str, Any]
    spec: RaceSpec
    standings: list[Standing]

    @property
    def leader(self) -> Standing:
        """The one whose lowest loss was raced to."""
        return next(s for s in self.standings if s.scheme == self.spec.leader)

    @property
    def target(self) -> float:
        """The loss that was raced to."""
        return target(self.leader.points)

    def dumps(self) -> str:
        fields = {
            **self.origin,
            **self.spec.told(),
            "target": self.spec.leader,
            "target_loss": self.target,
            "results": [_fields(each) for each in self.standings],
        }
        if self.spec.earlier:
            fields["earlier"] = self.spec.earlier
        return json.dumps(fields, indent=2) + "\n"


def resumed(spec: RaceSpec, path: Path) -> RaceSpec:
    """The race with the courses that a record has; as it is if there is no record.

    Raises ValueError if it is no record of a race, or of one with other conditions.
    """
    if not path.exists():
        return spec
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        courses = {row["scheme"]: _points(row["course"]) for row in found["results"]}
        whence = {name: found[name] for name in origin([])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"--resume: {path} is no record of a race ({error!r}): give another --out"
        ) from None
    told = spec.told()
    for name in told.keys() | found.keys() & OPTIONAL:
        if found.get(name) != told.get(name):
            raise ValueError(
                f"--resume: {path} is of a race with {name} {found.get(name)}, not "
                f"{told.get(name)}: give the same, or another --out"
            )
    return replace(spec, courses=courses, earlier=[*found.get("earlier", []), whence])


def _points(course: dict[str, list[float]]) -> list[Point]:
    columns = [course[name] for name in Point._fields]
    return [Point(*values) for values in zip(*columns, strict=True)]


def table(record: RaceRecord) -> Group:
    """The race as text, below lines that say what was raced to and what it is worth."""
    schemes = [each.scheme for each in record.standings]
    rows = grid(folded("scheme", schemes), *map(number, HEADINGS))
    for each in record.standings:
        there = each.arrival
        rows.add_row(
            each.scheme,
            str(each.last.steps),
            milliseconds(each.last.seconds / each.last.steps),
            f"{min(point.loss for point in each.points):.3f}",
            f"{there.seconds:.1f}" if there else "-",
            _spread(each) or "-",
            f"{there.sent_bytes / 1e6:.3g}" if there and there.sent_bytes else "-",
        )
    said = (
        "there: seconds until it first had that loss; MB then: sent by a rank until "
        f"then; times sooner than {record.spec.leader}: the median over the losses of "
        "its second half, and their range"
    )
    return Group(*map(Text, [*preface(record), said]), rows, *map(Text, noted(record)))


def _spread(standing: Standing) -> str:
    found = standing.sooner
    if found is None:
        return ""
    lowest = f"{found.lowest:.2f}" if found.lowest else "never"
    return f"{found.median:.2f} ({lowest}-{found.highest:.2f})"


def noted(record: RaceRecord) -> list[str]:
    """What is odd in a course: laps in which something else happened, the worst."""
    lines = []
    for each in record.standings:
        found = sorted(each.stalled, key=lambda stall: -stall.times)
        lines += [
            f"{each.scheme} stalled at step {stall.steps:.0f}: its lap took "
            f"{stall.times:.1f} times as long as those around it"
            for stall in found[:NOTED]
        ]
        if len(found) > NOTED:
            lines.append(f"{each.scheme} stalled {len(found)} times in all")
    return lines


def preface(record: RaceRecord) -> list[str]:
    """The lines above the table and above the picture."""
    spec = record.spec
    return [
        f"{spec.workload} on {spec.hosts} hosts x {spec.ranks_per_host} ranks, "
        f"{spec.links}; "
        f"{spec.seconds:g} s of training each, a look every {spec.every} steps",
        f"raced to: {spec.quantity} {record.target:.4g}, the lowest of "
        f"{spec.leader}; one seed, constant learning rate",
    ]


def write(out: Path, record: RaceRecord) -> None:
    """`record.json`, `table.txt` and `race.png` into `out`."""
    (out / "record.json").write_text(record.dumps(), encoding="utf-8")
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=WIDTH).print(table(record))
    draw(record, out / "race.png")


def _fields(standing: Standing) -> dict[str, Any]:
    """A row of the record; the course is a list for each of its quantities."""
    there = standing.arrival
    columns = zip(Point._fields, zip(*standing.points, strict=True), strict=True)
    return {
        "scheme": standing.scheme,
        "seconds_to_target": there and there.seconds,
        "sent_bytes_to_target": there and there.sent_bytes,
        "times_sooner": standing.sooner and standing.sooner._asdict(),
        "stalled": [stall._asdict() for stall in standing.stalled],
        "course": {name: list(values) for name, values in columns},
    }


def draw(record: RaceRecord, path: Path) -> None:
    """One line for each contestant, and a dot where it had the loss raced to."""
    from matplotlib.figure import Figure

    rows = len(record.standings)  # of the legend
    figure = Figure(figsize=(9, 4.2 + 0.22 * rows), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes, (xlabel, along) in zip(panels, _ALONG.items(), strict=True):
        for standing, colour in zip(record.standings, cycle(COLOURS), strict=False):
            course = falling(standing.points)
            xs = [along(point) for point in course]
            losses = [point.loss for point in course]
            style = {"color": colour, "label": _label(record, standing)}
            axes.plot(xs, losses, linewidth=1.8, **style)
            if standing.arrival is not None:
                dot = along(standing.arrival), record.target
                axes.plot(*dot, color=colour, marker="o", zorder=3)
        axes.axhline(record.target, color=GREY, linewidth=1, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(**PALE)
        axes.set(xlabel=xlabel, xlim=(0, None))
    panels[0].set(ylabel=record.spec.quantity, ylim=_limits(record))
    finish(panels[0], preface(record), 1, path)


def _label(record: RaceRecord, standing: Standing) -> str:
    there, found = standing.arrival, standing.sooner
    when = "not there" if there is None else f"{there.seconds:.1f} s"
    return f"{standing.scheme}: {when}" + (f", {found.median:.2f} x" if found else "")


def _limits(record: RaceRecord) -> tuple[float, float]:
    losses = [point.loss for each in record.standings for point in each.points]
    top = record.target + SHOWN * (max(losses) - record.target)
    return min(losses) - 0.04 * (top - min(losses)), top
