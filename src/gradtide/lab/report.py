"""A comparison, from what was typed to what it leaves: tables, record, chart, trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.measure import Measurement
from rich.progress import MofNCompleteColumn
from rich.table import Table
from rich.text import Text

from gradtide.lab.chart import PARTS, draw
from gradtide.lab.contest import bar, hold
from gradtide.lab.job import Tell
from gradtide.lab.record import Result, milliseconds, origin
from gradtide.lab.spec import Spec, check
from gradtide.lab.tables import folded, grid, number
from gradtide.lab.timeline import Span, trace
from gradtide.lab.worker import Outcome, measure
from gradtide.lab.workloads import REPLAYED
from gradtide.lab.workloads.workload import Timing

WIDTH = 160  # columns of table.txt


def compare(
    spec: Spec, out: Path, argv: Sequence[str], rank: int | None = None
) -> None:
    """Compare on an emulated cluster, or as one of torchrun's ranks (`hold`)."""
    hold(spec, out, argv, rank, check, measure, _progress, _conclude)


def _conclude(
    spec: Spec, found: Outcome, out: Path, argv: Sequence[str], console: Console
) -> None:
    record = Record(origin(argv), spec, *found)
    console.print(table(record, console.width))
    write(out, record)
    console.print(f"record.json, table.txt, chart.png, trace.json are in {out}")


@contextmanager
def _progress(spec: Spec, console: Console) -> Iterator[Tell]:
    """A bar over the steps of all contestants, with the one whose turn it is."""
    num_steps = spec.warmup + spec.steps + spec.rounds
    done = dict.fromkeys(spec.schemes, 0)
    with bar(console, num_steps * len(done), MofNCompleteColumn()) as advance:

        def tell(name: str) -> None:
            if name in done:
                done[name] += 1
            here = f"{name}, step {done.get(name, 0)}/{num_steps}"
            advance(here, sum(done.values()))

        yield tell


@dataclass(frozen=True)
class Record:
    """Its origin, what was asked and found; `record.json` says the first three."""

    origin: dict[str, Any]
    spec: Spec
    results: list[Result]
    timelines: dict[str, list[Span]]
    compute: Timing

    def dumps(self) -> str:
        rows = [asdict(result) for result in self.results]
        for row in rows:
            for name in ("evaluation", "became", "stages"):
                if row[name] is None:
                    del row[name]
        asked = {**self.spec.told(), "steps": self.spec.steps}
        return json.dumps({**self.origin, **asked, "results": rows}, indent=2) + "\n"


class Column(NamedTuple):
    """A heading, what a row has to say there (None: nothing), and how it is written."""

    heading: str
    value: Callable[[Result], Any]
    text: Callable[[Any], str]


def distance(row: Result) -> float | None:
    """How far the step is from its limit: 0.1 is ten percent longer."""
    if row.limit_seconds is None:
        return None
    return row.step_seconds / row.limit_seconds - 1


def _quartiles(seconds: tuple[float, float]) -> str:
    return "-".join(map(milliseconds, seconds))


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3g}"


def _part(field: str, name: str, row: Result) -> float | None:
    """One of several numbers in a field; of evaluation or stages."""
    return (getattr(row, field) or {}).get(name)


_STAGES = {
    "FF&BP": "forward_backward",
    "grad comm": "gradient_comm",
    "factor comp": "factor_comp",
    "factor comm": "factor_comm",
    "inverse comp": "inverse_comp",
    "inverse comm": "inverse_comm",
}
_COLUMNS = (
    Column("step ms", attrgetter("step_seconds"), milliseconds),
    Column("quartiles", attrgetter("step_seconds_p25", "step_seconds_p75"), _quartiles),
    Column("x ddp", attrgetter("speedup_over_ddp"), "{:.2f}".format),
    Column("limit ms", attrgetter("limit_seconds"), milliseconds),
    Column("over it", distance, "{:+.0%}".format),
    *(Column(p, attrgetter(f"{p}_seconds"), milliseconds) for p, *_ in PARTS),
    Column("sent MB", attrgetter("payload_bytes"), _megabytes),
    Column("link MB", attrgetter("interface_bytes"), _megabytes),
    Column("CPU s", attrgetter("cpu_seconds"), "{:.3f}".format),
    Column("density", attrgetter("density"), "{:.3g}".format),
    Column("loss", attrgetter("final_loss"), "{:.4f}".format),
    *(Column(h, partial(_part, "stages", s), milliseconds) for h, s in _STAGES.items()),
)


def table(record: Record, width: int) -> Group:
    """The comparison as text, below lines that say what of it was real.

    As many tables, one below the other, as `width` columns of text make necessary.
    """
    rows = record.results
    names = dict.fromkeys(name for row in rows for name in row.evaluation or {})
    scores = [
        Column(f"val {name}", partial(_part, "evaluation", name), "{:.4f}".format)
        for name in names
    ]
    columns = (*_COLUMNS, *scores)
    used = [c for c in columns if any(c.value(row) is not None for row in rows)]
    grids = []
    while used:
        count = _fitting(rows, used, width)
        grids.append(_grid(rows, used[:count]))
        used = used[count:]
    return Group(*map(Text, preface(record)), *grids)


def _fitting(rows: Sequence[Result], columns: Sequence[Column], width: int) -> int:
    """How many of the first `columns` one table can hold; at least one."""
    ruler = Console(width=10 * WIDTH)
    for count in range(len(columns), 1, -1):
        table = _grid(rows, columns[:count])
        if Measurement.get(ruler, ruler.options, table).maximum <= width:
            return count
    return 1


def _grid(rows: Sequence[Result], columns: Sequence[Column]) -> Table:
    names = folded("scheme", [row.scheme for row in rows])
    table = grid(names, *(number(column.heading) for column in columns))
    for row in rows:
        found = [(column.value(row), column.text) for column in columns]
        table.add_row(row.scheme, *("-" if x is None else text(x) for x, text in found))
    return table


def preface(record: Record) -> list[str]:
    """The lines above the table."""
    spec = record.spec
    forward, backward = map(milliseconds, record.compute)
    if spec.workload in REPLAYED:
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
        f"{spec.workload} on {spec.hosts} hosts x {spec.ranks_per_host} ranks, "
        f"{spec.links}; medians of {spec.steps} steps; bytes and CPU per rank and step",
        compute,
        *(f"{row.scheme} became {row.became}" for row in record.results if row.became),
    ]


def write(out: Path, record: Record) -> None:
    """`record.json`, `table.txt`, `chart.png` and `trace.json` into `out`."""
    (out / "record.json").write_text(record.dumps(), encoding="utf-8")
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=WIDTH).print(table(record, WIDTH))
    events = json.dumps(trace(record.timelines), indent=1)
    (out / "trace.json").write_text(events, encoding="utf-8")
    draw(record.results, preface(record), out / "chart.png")
