"""What a comparison shows and leaves behind: table, record, chart and trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gradtide.lab.chart import draw
from gradtide.lab.rate import format_rate
from gradtide.lab.record import Record, Result, milliseconds
from gradtide.lab.summary import Facts
from gradtide.lab.timeline import trace
from gradtide.lab.worker import Outcome

WIDTH = 160  # columns of table.txt
_NOTHING = "-"


class Column(NamedTuple):
    """A heading, and what a row says there; None where it has nothing to say."""

    heading: str
    cell: Callable[[Result], str | None]


def distance(row: Result) -> float | None:
    """How far the step is from its limit: 0.1 is ten percent longer."""
    if row.limit_seconds is None:
        return None
    return row.step_seconds / row.limit_seconds - 1


def _stage(row: Result, name: str) -> str | None:
    return None if row.stages is None else _milliseconds(row.stages[name])


_COLUMNS = (
    Column("step ms", lambda row: _milliseconds(row.step_seconds)),
    Column(
        "quartiles",
        lambda row: (
            f"{milliseconds(row.step_seconds_p25)}-{milliseconds(row.step_seconds_p75)}"
        ),
    ),
    Column("x ddp", lambda row: _format(row.speedup_over_ddp, ".2f")),
    Column("limit ms", lambda row: _milliseconds(row.limit_seconds)),
    Column("over it", lambda row: _format(distance(row), "+.0%")),
    Column("forward", lambda row: _milliseconds(row.forward_seconds)),
    Column("backward", lambda row: _milliseconds(row.backward_seconds)),
    Column("select", lambda row: _milliseconds(row.select_seconds)),
    Column("exposed", lambda row: _milliseconds(row.exposed_seconds)),
    Column("apply", lambda row: _milliseconds(row.apply_seconds)),
    Column("sent MB", lambda row: _megabytes(row.payload_bytes)),
    Column("link MB", lambda row: _megabytes(row.interface_bytes)),
    Column("CPU s", lambda row: _format(row.cpu_seconds, ".3f")),
    Column("density", lambda row: _format(row.density, ".3g")),
    Column("loss", lambda row: _format(row.final_loss, ".4f")),
    *(
        Column(heading, lambda row, name=name: _stage(row, name))  # type: ignore[misc]
        for name, heading in (
            ("forward_backward", "FF&BP"),
            ("gradient_comm", "grad comm"),
            ("factor_comp", "factor comp"),
            ("factor_comm", "factor comm"),
            ("inverse_comp", "inverse comp"),
            ("inverse_comm", "inverse comm"),
        )
    ),
)


def table(record: Record, common: Facts, width: int) -> Group:
    """The comparison as text, below lines that say what of it was real.

    As many tables, one below the other, as `width` columns of text make necessary.
    """
    rows = record.results
    used = [
        column
        for column in (*_COLUMNS, *_scores(rows))
        if any(column.cell(row) is not None for row in rows)
    ]
    grids = []
    while used:
        count = _fitting(rows, used, width)
        grids.append(_grid(rows, used[:count]))
        used = used[count:]
    return Group(*map(Text, preface(record, common)), *grids)


def _fitting(rows: Sequence[Result], columns: Sequence[Column], width: int) -> int:
    """How many of the first `columns` one table can hold; at least one."""
    ruler = Console(width=10 * WIDTH)

    def fits(count: int) -> bool:
        grid = _grid(rows, columns[:count])
        return Measurement.get(ruler, ruler.options, grid).maximum <= width

    return max((n for n in range(1, len(columns) + 1) if fits(n)), default=1)


def _grid(rows: Sequence[Result], columns: Sequence[Column]) -> Table:
    grid = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    # Recipes' names stay whole, constructor calls are folded.
    longest = max(len(row.scheme) for row in rows)
    grid.add_column("scheme", overflow="fold", width=max(6, min(longest, 24)))
    for column in columns:
        grid.add_column(column.heading, justify="right", no_wrap=True)
    for row in rows:
        cells = (column.cell(row) for column in columns)
        grid.add_row(row.scheme, *(_NOTHING if c is None else c for c in cells))
    return grid


def preface(record: Record, common: Facts) -> list[str]:
    """The lines above the table."""
    rate = record.rate_bits_per_s
    links = "links not shaped" if rate is None else f"links of {format_rate(rate)}/s"
    forward, backward = map(milliseconds, common.compute)
    if common.replayed:
        compute = (
            f"REPLAYED: compute is a wait of {forward} ms forward + {backward} ms "
            "backward, communication is real; nothing is learned, so there is no loss"
        )
    else:
        compute = (
            f"compute is real: {forward} ms forward + {backward} ms backward when "
            "nobody communicates"
        )
    return [
        f"{record.workload} on {record.hosts} hosts x {record.ranks_per_host} ranks, "
        f"{links}; medians of {record.steps} steps; bytes and CPU per rank and step",
        compute,
        *(f"{row.scheme} became {row.became}" for row in record.results if row.became),
    ]


def write(out: Path, record: Record, outcome: Outcome) -> None:
    """`record.json`, `table.txt`, `chart.png` and `trace.json` into `out`."""
    (out / "record.json").write_text(record.dumps(), encoding="utf-8")
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=WIDTH).print(table(record, outcome.facts, WIDTH))
    events = json.dumps(trace(outcome.timelines), indent=1)
    (out / "trace.json").write_text(events, encoding="utf-8")
    draw(record.results, preface(record, outcome.facts), out / "chart.png")


def _scores(rows: Sequence[Result]) -> list[Column]:
    """A column for each number that evaluation gave."""
    names = {name: None for row in rows for name in row.evaluation or {}}

    def column(name: str) -> Column:
        return Column(
            f"val {name}",
            lambda row: _format((row.evaluation or {}).get(name), ".4f"),
        )

    return [column(name) for name in names]


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else milliseconds(seconds)


def _megabytes(count: float | None) -> str | None:
    return None if count is None else f"{count / 1e6:.3g}"


def _format(value: float | None, style: str) -> str | None:
    return None if value is None else format(value, style)
