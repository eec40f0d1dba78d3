"""Rows, tables, the record and the files in the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console, Group

from gradtide.profile.selection.findings import Record, Result, dense_times, rows
from gradtide.profile.selection.measure import COPY, TOPK, Timing
from gradtide.profile.selection.report import show, table, write
from gradtide.profile.selection.wire import break_even

TIMINGS = {
    "Threshold": Timing([0.004, 0.002, 0.003], [0.001, 0.002, 0.002], 10_500),
    "Dear": Timing([0.5], [0.5], 400_000),
    TOPK: Timing([0.08], [0.08], 10_000),
    COPY: Timing([0.001], [0.001], 1_000_000),
}


def record() -> Record:
    sizes, densities = (1_000_000, 2_000_000), (0.01, 0.1)
    return Record(
        command="gradtide profile selection",
        commit=None,
        versions={"torch": "0"},
        machine={"cpu": "abacus", "cores": 1},
        device="cpu",
        threads=1,
        ranks=8,
        dense=dense_times(sizes, (1e8, 1e9), 8),
        results=[r for n in sizes for d in densities for r in rows(n, d, 8, TIMINGS)],
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
    return next(row.split() for row in shown.splitlines() if name in row.split()[:2])


def test_rows_are_medians() -> None:
    (row, *_) = rows(1_000_000, 0.01, 8, TIMINGS)
    quartiles = (row.seconds_p25, row.seconds, row.seconds_p75)
    assert quartiles == pytest.approx((0.0025, 0.003, 0.0035))
    assert (row.rounds, row.realised_density) == (3, 0.0105)
    assert row.break_even_bits_per_s == break_even(1_000_000, 10_500, 8, row.seconds)


def test_yardsticks_send_nothing() -> None:
    for row in rows(1_000_000, 0.01, 8, TIMINGS)[2:]:
        assert row.realised_density is row.break_even_bits_per_s is None


def test_table() -> None:
    assert line("Threshold") == [
        *("0.01", "Threshold", "3", "2", "3.0", "26.7", "0.0105", "17.5gbit")
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
    assert set(written) == set(Record.__dataclass_fields__)
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
