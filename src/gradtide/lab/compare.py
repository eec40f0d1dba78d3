"""The side-by-side comparison, from what was typed to what is left in the folder.

Checks everything that can be known beforehand, measures on every rank of an emulated
cluster (or is one of torchrun's ranks itself), and reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn

from gradtide.lab.contest import bar, hold
from gradtide.lab.job import Tell
from gradtide.lab.record import Record, origin
from gradtide.lab.report import table, write
from gradtide.lab.spec import Spec, check
from gradtide.lab.worker import Outcome, measure


def compare(
    spec: Spec, out: Path, argv: Sequence[str], rank: int | None = None
) -> None:
    """Compare on an emulated cluster, or as one of torchrun's ranks (`hold`)."""
    hold(spec, out, argv, rank, check, measure, _progress, _conclude)


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
        local_rate_bits_per_s=spec.local_rate,
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
    with bar(console, num_steps * len(done), MofNCompleteColumn()) as advance:

        def tell(name: str) -> None:
            if name in done:
                done[name] += 1
            here = f"{name}, step {done.get(name, 0)}/{num_steps}"
            advance(here, sum(done.values()))

        yield tell
