"""What a profile of selection shows and leaves behind: tables, record and chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gradtide.lab.rate import format_rate
from gradtide.lab.record import milliseconds
from gradtide.profile.selection.chart import draw
from gradtide.profile.selection.findings import DenseTime, Record, Result
from gradtide.profile.selection.measure import COPY, TOPK

WIDTH = 80  # columns of table.txt
_NOTHING = "-"
_HEADINGS = ("ms", "CPU ms", "x copy", "x topk", "realised", "break-even")


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
    grid = Table(
        header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    grid.add_column("density", no_wrap=True)
    grid.add_column("selector", no_wrap=True)
    for heading in _HEADINGS:
        grid.add_column(heading, justify="right", no_wrap=True)
    for density in dict.fromkeys(row.density for row in results):
        block = {row.name: row for row in results if row.density == density}
        for row in block.values():
            grid.add_row(
                f"{density:g}" if row is next(iter(block.values())) else "",
                row.name,
                *_cells(row, block[COPY].seconds, block[TOPK].seconds),
            )
        grid.add_section()
    wire = ", ".join(
        f"{milliseconds(each.seconds)} ms at {format_rate(each.rate_bits_per_s)}"
        for each in dense
        if each.n == n
    )
    return Group(Text(f"\n{n:,} elements; dense on the wire: {wire}"), grid)


def show(record: Record) -> Group:
    """All tables, one size below the other."""
    sizes = dict.fromkeys(row.n for row in record.results)
    return Group(
        Text(preface(record.device, record.threads, record.ranks)),
        *(
            table([row for row in record.results if row.n == n], record.dense)
            for n in sizes
        ),
    )


def write(out: Path, record: Record) -> None:
    """`record.json`, `table.txt` and `chart.png` into `out`, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "record.json").write_text(record.dumps(), encoding="utf-8")
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=WIDTH).print(show(record))
    draw(record, out / "chart.png")


def _cells(row: Result, copy: float, topk: float) -> list[str]:
    rate, realised = row.break_even_bits_per_s, row.realised_density
    return [
        milliseconds(row.seconds),
        milliseconds(row.cpu_seconds),
        f"{row.seconds / copy:.1f}",
        f"{topk / row.seconds:.1f}",
        _NOTHING if realised is None else f"{realised:.3g}",
        _NOTHING if rate is None else _rate(rate),
    ]


def _rate(bits: float) -> str:
    """Three digits; nobody's link is known any better."""
    return format_rate(float(f"{bits:.3g}")) if bits >= 1 else "never"
