"""The table, the chart, and the files in the folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.lab.samples import SPEC, record, row

from gradtide.lab.report import distance, table, write

ROWS = (
    row("ddp", 3.0, speedup_over_ddp=1.0, limit_seconds=2.5),
    row("dear", 2.0, speedup_over_ddp=1.5, limit_seconds=1.6, interface_bytes=1.6e8),
)


def text(width: int = 160, workload: str = SPEC.workload) -> str:
    console = Console(width=width)
    found = replace(record(*ROWS), spec=replace(SPEC, workload=workload))
    with console.capture() as capture:
        console.print(table(found, width))
    return capture.get()


def test_a_replay_is_never_taken_for_the_real_thing() -> None:
    assert "compute is a wait of 1000 ms" in text()
    assert "compute is real" in text(workload="gpt")


def test_rows_say_what_was_measured() -> None:
    (dear,) = [line for line in text().splitlines() if "dear" in line]
    assert dear.split() == [
        *("dear", "2000", "1800-2200", "1.50", "1600", "+25%"),
        *("400", "600", "800", "200", "150", "160", "0.250"),
    ]


def test_what_nobody_has_is_left_out_and_what_one_lacks_is_a_dash() -> None:
    assert "density" not in text()
    assert "loss" not in text().split("scheme")[1]
    (ddp,) = [line for line in text().splitlines() if line.startswith(" ddp ")]
    assert " - " in ddp


def test_a_narrow_terminal_gets_several_whole_tables() -> None:
    for width, number in ((160, 1), (80, 2), (50, 3)):
        shown = text(width)
        assert shown.count(" scheme ") == number
        assert all(word in shown for word in ("1800-2200", "0.250"))


def test_scores_have_columns() -> None:
    console = Console(width=200)
    rows = record(row("ddp", 1.0, evaluation={"loss": 1.25, "accuracy": 0.5}))
    with console.capture() as capture:
        console.print(table(rows, 200))
    assert "val accuracy" in capture.get()
    assert "1.2500" in capture.get()


def test_distance() -> None:
    assert distance(row("x", 1.1, limit_seconds=1.0)) == pytest.approx(0.1)
    assert distance(row("x", 1.1)) is None


def test_files(tmp_path: Path) -> None:
    write(tmp_path, record(*ROWS))
    assert {path.name for path in tmp_path.iterdir()} == {
        "record.json",
        "table.txt",
        "chart.png",
        "trace.json",
    }
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "dear" in (tmp_path / "table.txt").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(json.loads((tmp_path / "record.json").read_text())["results"]) == 2


def test_stages_of_kfac_have_columns() -> None:
    names = ("forward_backward", "gradient_comm", "factor_comp", "factor_comm")
    stages = dict.fromkeys((*names, "inverse_comp", "inverse_comm"), 0.375)
    rows = record(row("wfbp", 1.0), row("spd_kfac", 1.0, stages=stages))
    console = Console(width=300)
    with console.capture() as capture:
        console.print(table(rows, 300))
    assert "inverse comm" in capture.get()
    assert capture.get().count("375") == 6
