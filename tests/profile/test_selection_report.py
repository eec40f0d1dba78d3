"""Rows, tables, the record and the files in the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console, Group

from gradtide.lab.record import origin
from gradtide.profile.selection.measure import COPY, TOPK, Timing
from gradtide.profile.selection.report import show, table, write
from gradtide.profile.selection.run import (
    Record,
    Result,
    break_even,
    dense_times,
    row,
)

TIMINGS = {
    "Threshold": Timing([0.004, 0.002, 0.003], [0.001, 0.002, 0.002], [10_500]),
    "Dear": Timing([0.5], [0.5], [400_000]),
    TOPK: Timing([0.08], [0.08], [10_000]),
    COPY: Timing([0.001], [0.001], [1_000_000]),
}

ORIGIN = origin(["gradtide", "profile", "selection"])


def rows(n: int, density: float) -> list[Result]:
    return [row(name, n, density, 8, timing) for name, timing in TIMINGS.items()]


def record() -> Record:
    sizes, densities = (1_000_000, 2_000_000), (0.01, 0.1)
    return Record(
        origin=ORIGIN,
        device="cpu",
        threads=1,
        ranks=8,
        dense=dense_times(sizes, (1e8, 1e9), 8),
        results=[r for n in sizes for d in densities for r in rows(n, d)],
    )


def text(shown: Group) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def line(name: str) -> list[str]:
    shown = text(table(record().results[:8], record().dense))
    assert "…" not in shown
    assert "56 ms at 1gbit" in shown
    return next(x.split() for x in shown.splitlines() if name in x.split()[:2])


def test_rows_are_medians() -> None:
    (first, *_) = rows(1_000_000, 0.01)
    quartiles = (first.seconds_p25, first.seconds, first.seconds_p75)
    assert quartiles == pytest.approx((0.0025, 0.003, 0.0035))
    assert (first.rounds, first.realised_density) == (3, 0.0105)
    rate = break_even(1_000_000, 10_500, 8, first.seconds)
    assert first.break_even_bits_per_s == rate


def test_yardsticks_send_nothing() -> None:
    for found in rows(1_000_000, 0.01)[2:]:
        assert found.realised_density is found.break_even_bits_per_s is None


def test_table() -> None:
    assert line("Threshold") == [
        *("0.01", "Threshold", "3", "2", "3.0", "26.7", "0.0105", "17.7gbit")
    ]
    assert line("Dear")[-1] == "never"
    assert line(COPY) == [COPY, "1", "1", "1.0", "80.0", "-", "-"]


def test_every_size_has_a_table_below_the_explanation() -> None:
    shown = text(show(record()))
    assert "among 8 ranks" in " ".join(shown.split())
    assert "1,000,000 elements" in shown
    assert "2,000,000 elements" in shown
    assert shown.count(" Threshold ") == 4


def test_record_says_everything() -> None:
    written = json.loads(record().dumps())
    assert set(written) == {*ORIGIN, *Record.__dataclass_fields__} - {"origin"}
    assert len(written["results"]) == 16
    assert set(written["results"][0]) == set(Result.__dataclass_fields__)
    first = written["dense"][0]
    assert first == {"n": 1_000_000, "rate_bits_per_s": 1e8, "seconds": 0.56}


def test_files(tmp_path: Path) -> None:
    write(tmp_path / "new", record())
    found = {path.name for path in (tmp_path / "new").iterdir()}
    assert found == {"record.json", "table.txt", "chart.png"}
    assert (tmp_path / "new" / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "Threshold" in (tmp_path / "new" / "table.txt").read_text()
