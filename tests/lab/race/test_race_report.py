"""The table, the picture and the record of a race."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from gradtide.lab.race.report import RaceRecord, speedup, table, write
from gradtide.lab.race.standings import Point, standings
from gradtide.lab.spec import RaceSpec

SPEC = RaceSpec(("ddp", "dear", "topk"), "gpt-small", 4, 1, 5e7, 20.0, 10)
COURSES = {
    "ddp": [Point(0.0, 0, 0, 5.0), Point(10.0, 10, 5e7, 4.0), Point(20, 20, 1e8, 3.0)],
    "dear": [Point(0.0, 0, 0, 5.0), Point(8.0, 10, 5e7, 3.0), Point(20, 25, 1e8, 2.5)],
    "topk": [Point(0.0, 0, 0, 5.0), Point(20.0, 200, 1e6, 3.5)],
}


def record() -> RaceRecord:
    return RaceRecord({"command": "gradtide race"}, SPEC, standings(COURSES))


def test_rows_say_who_was_there_when_and_who_never_was() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(record()))
    shown = capture.get()
    ddp, dear, topk = (line.split() for line in shown.splitlines()[-4:-1])
    assert ddp == ["ddp", "20", "1000", "3.000", "20.0", "1.00", "99.9", "100"]
    assert dear == ["dear", "25", "800", "2.500", "8.0", "2.50", "49.9", "100"]
    assert topk == ["topk", "200", "100", "3.500", "-", "-", "-", "1"]
    assert "raced to: held-out loss 3.003, the lowest of ddp" in shown


def test_a_terminal_of_80_columns_shows_all() -> None:
    name = "exdyna(0.01, schedule='local', warmup=240, wire='bf16')"
    found = RaceRecord({}, SPEC, standings({name: COURSES["ddp"]}))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(found))
    assert "…" not in capture.get()
    assert "MB then" in capture.get()


def test_nobody_is_faster_than_who_never_arrives() -> None:
    first, second, third = record().standings
    assert speedup(first, second) == pytest.approx(2.5, abs=0.01)
    assert speedup(first, third) is None
    assert speedup(third, second) is None


def test_the_folder_has_all_numbers_and_a_picture(tmp_path: Path) -> None:
    write(tmp_path, record())
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["command"] == "gradtide race"
    assert written["target_loss"] == pytest.approx(3.003)
    ddp, dear, topk = written["results"]
    assert ddp["course"]["loss"] == [5.0, 4.0, 3.0]
    assert ddp["course"]["steps"] == [0, 10, 20]
    assert dear["seconds_to_target"] == pytest.approx(8.0, abs=0.02)
    assert topk["seconds_to_target"] is topk["sent_bytes_to_target"] is None
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    assert "dear" in (tmp_path / "table.txt").read_text()
