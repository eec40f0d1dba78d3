"""What a profile of selection shows and leaves behind: tables, record and chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from gradtide.core.grouped import grouped
from gradtide.lab import tables
from gradtide.lab.chart import COLOURS, GREY, finish, panels
from gradtide.lab.rate import format_rate
from gradtide.lab.record import milliseconds
from gradtide.profile.selection.measure import COPY, TOPK
from gradtide.profile.selection.run import DenseTime, Record, Result

WIDTH = 80  # columns of table.txt
_MARKERS = "os^vDPX*"


def preface(device: str, threads: int, ranks: int) -> str:
    """The lines above the tables."""
    return (
        f"One round is accumulate + select + take out, of float32 on {device}, threads:"
        f" {threads}. Medians; on one thread, CPU is less than the time where others"
        " were at work on the machine. x copy: times as long as a copy of the same"
        " bytes. x topk: times as fast as torch.topk alone. break-even: the rate of"
        " links below which selecting and all-gathering the entries among"
        f" {ranks} ranks is faster than a dense ring all-reduce; never: the sparse"
        " message is the longer one."
    )


def table(results: Sequence[Result], dense: Sequence[DenseTime]) -> Group:
    """The rows of one size, in blocks of one density."""
    n = results[0].n
    headings = ("ms", "CPU ms", "x copy", "x topk", "realised", "break-even")
    names = map(tables.name, ("density", "selector"))
    grid = tables.grid(*names, *map(tables.number, headings), padding=(0, 1, 0, 0))
    for density, rows in grouped(results, lambda row: row.density).items():
        block = {row.name: row for row in rows}
        for i, row in enumerate(block.values()):
            cells = _cells(row, block[COPY].seconds, block[TOPK].seconds)
            grid.add_row("" if i else f"{density:g}", row.name, *cells)
        grid.add_section()
    wire = ", ".join(
        f"{milliseconds(each.seconds)} ms at {format_rate(each.rate_bits_per_s)}"
        for each in dense
        if each.n == n
    )
    return Group(Text(f"\n{n:,} elements; dense on the wire: {wire}"), grid)


def show(record: Record) -> Group:
    """All tables, one size below the other."""
    blocks = grouped(record.results, lambda row: row.n).values()
    head = Text(preface(record.device, record.threads, record.ranks))
    return Group(head, *(table(rows, record.dense) for rows in blocks))


def write(out: Path, record: Record) -> None:
    """`record.json`, `table.txt` and `chart.png` into `out`, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "record.json").write_text(record.dumps(), encoding="utf-8")
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=WIDTH).print(show(record))
    draw(record, out / "chart.png")


def draw(record: Record, path: Path) -> None:
    """A panel for each density: milliseconds over elements, both logarithmic.

    Below a grey line, which is the dense gradient on the wire at one rate, there is
    time for the sparse message.
    """
    blocks = grouped(record.results, lambda row: row.density)
    titles, size = [f"density {d:g}" for d in blocks], (2 + 3.6 * len(blocks), 5)
    found = panels(titles, size, "elements")
    for rows, axes in zip(blocks.values(), found, strict=True):
        _lines(axes, rows)
        _wire(axes, record)
    heading = (
        f"accumulate + select + take out on {record.device}, threads: {record.threads};"
        f" grey: dense all-reduce of {record.ranks} ranks on the wire"
    )
    finish(found[0], [heading], 6, path)


def _lines(axes: Any, results: Sequence[Result]) -> None:
    by_name = grouped(results, lambda row: row.name)
    for place, (name, rows) in enumerate(by_name.items()):
        yardstick = name in (TOPK, COPY)
        sizes, times = [row.n for row in rows], [row.seconds * 1e3 for row in rows]
        style = {"linestyle": {TOPK: "--", COPY: ":"}.get(name, "-"), "label": name}
        style["color"] = GREY if yardstick else COLOURS[place % len(COLOURS)]
        marker = None if yardstick else _MARKERS[place % len(_MARKERS)]
        axes.plot(sizes, times, marker=marker, markersize=4, **style)


def _wire(axes: Any, record: Record) -> None:
    by_rate = grouped(record.dense, lambda time: time.rate_bits_per_s)
    for rate, each in by_rate.items():
        sizes, times = [t.n for t in each], [t.seconds * 1e3 for t in each]
        axes.plot(sizes, times, color="0.6", linewidth=0.8)
        axes.annotate(format_rate(rate), (sizes[-1], times[-1]), fontsize=7, ha="right")


def _cells(row: Result, copy: float, topk: float) -> list[str]:
    rate, realised = row.break_even_bits_per_s, row.realised_density
    return [
        milliseconds(row.seconds),
        milliseconds(row.cpu_seconds),
        f"{row.seconds / copy:.1f}",
        f"{topk / row.seconds:.1f}",
        "-" if realised is None else f"{realised:.3g}",
        "-" if rate is None else _rate(rate),
    ]


def _rate(bits: float) -> str:
    """Three digits; nobody's link is known any better."""
    return format_rate(float(f"{bits:.3g}")) if bits >= 1 else "never"
