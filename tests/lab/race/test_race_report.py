"""The table, the picture and the record of a race."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gradtide.lab.race.report import RaceRecord, resumed, table, write
from gradtide.lab.race.standings import Point, standings
from gradtide.lab.record import origin
from gradtide.lab.spec import RaceSpec

SPEC = RaceSpec(("ddp", "dear", "topk"), "gpt-small", 4, 1, 5e7, 20.0, 10)
ORIGIN = origin(["gradtide", "race"])
COURSES = {
    "ddp": [Point(0.0, 0, 0, 5.0), Point(10.0, 10, 5e7, 4.0), Point(20, 20, 1e8, 3.0)],
    "dear": [Point(0.0, 0, 0, 5.0), Point(8.0, 10, 5e7, 3.0), Point(20, 25, 1e8, 2.5)],
    "topk": [Point(0.0, 0, 0, 5.0), Point(20.0, 200, 1e6, 3.5)],
}


def record() -> RaceRecord:
    return RaceRecord(ORIGIN, SPEC, standings(COURSES, "ddp"))


def test_rows_say_who_was_there_when_and_who_never_was() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(record()))
    shown = capture.get()
    ddp, dear, topk = (line.split() for line in shown.splitlines()[-4:-1])
    assert ddp == ["ddp", "20", "1000", "3.000", "20.0", "1.00", "(1.00-1.00)", "99.9"]
    times = ["2.50", "(2.50-2.50)"]  # at a loss of 4 and at one of 3
    assert dear == ["dear", "25", "800", "2.500", "8.0", *times, "49.9"]
    half = ["0.38", "(never-0.75)"]  # it has 4 after 13.3 s, and never 3
    assert topk == ["topk", "200", "100", "3.500", "-", *half, "-"]
    assert "raced to: held-out loss 3.003, the lowest of ddp" in shown


def test_a_terminal_of_80_columns_shows_all() -> None:
    name = "exdyna(0.01, schedule='local', warmup=240, wire='bf16')"
    spec = replace(SPEC, schemes=(name,))
    found = RaceRecord({}, spec, standings({name: COURSES["ddp"]}, name))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(found))
    assert "…" not in capture.get()
    assert "MB then" in capture.get()


def test_the_folder_has_all_numbers_and_a_picture(tmp_path: Path) -> None:
    write(tmp_path, record())
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["command"] == "gradtide race"
    assert written["target_loss"] == pytest.approx(3.003)
    ddp, dear, topk = written["results"]
    assert ddp["course"]["loss"] == [5.0, 4.0, 3.0]
    assert ddp["course"]["steps"] == [0, 10, 20]
    assert dear["seconds_to_target"] == pytest.approx(8.0, abs=0.02)
    assert dear["times_sooner"]["median"] == pytest.approx(2.5, abs=0.01)
    assert dear["stalled"] == []
    assert topk["seconds_to_target"] is topk["sent_bytes_to_target"] is None
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    assert "dear" in (tmp_path / "table.txt").read_text()


def test_who_sets_the_target_need_not_be_the_first() -> None:
    spec = replace(SPEC, target="dear")
    found = RaceRecord({}, spec, standings(COURSES, "dear"))
    assert found.target == pytest.approx(2.5025)
    assert json.loads(found.dumps())["target"] == "dear"
    assert [each.arrival is None for each in found.standings] == [True, False, True]


def test_a_record_gives_back_the_courses(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert resumed(SPEC, path) == SPEC
    path.write_text(record().dumps())
    # Others may take part, and another may lead.
    spec = resumed(replace(SPEC, schemes=("ddp", "wfbp"), target="wfbp"), path)
    assert spec.courses == COURSES
    assert spec.missing == ("wfbp",)
    # Where courses come from is told by every record after it.
    courses = spec.courses | {"wfbp": COURSES["dear"]}
    again = RaceRecord(ORIGIN, spec, standings(courses, "wfbp"))
    path.write_text(again.dumps())
    assert resumed(spec, path).earlier == [ORIGIN, ORIGIN]


@pytest.mark.parametrize(
    ("name", "value"),
    [("seconds", 30.0), ("seed", 1), ("rate", None), ("local_rate", 1e9)],
)
def test_another_race_is_not_resumed(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "record.json"
    path.write_text(record().dumps())
    with pytest.raises(ValueError, match=f"race with {name}.*another --out"):
        resumed(replace(SPEC, **{name: value}), path)  # type: ignore[arg-type]


def test_what_is_no_record_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for text in ("{", "[]", "{}", "[" * 10**5, '{"results": [{"scheme": "ddp"}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="no record of a race"):
            resumed(SPEC, path)
    with pytest.raises(ValueError, match="no record of a race"):
        resumed(SPEC, tmp_path)  # a folder


def test_laps_in_which_something_else_happened_are_named() -> None:
    seconds = [0.0, 1.0, 2.0, 9.0, 10.0, 11.0]
    course = [Point(t, 10 * i, 0, 5.0 - i) for i, t in enumerate(seconds)]
    found = RaceRecord({}, SPEC, standings(COURSES | {"ddp": course}, "ddp"))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(found))
    assert "ddp stalled at step 20: its lap took 7.0 times" in capture.get()
