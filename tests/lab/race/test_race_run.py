"""The whole race on loopback, from the spec to the folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gradtide.lab.race.report import RaceRecord, race, resumed
from gradtide.lab.race.standings import Point, standings
from gradtide.lab.record import origin
from gradtide.lab.spec import RaceSpec

pytestmark = pytest.mark.alone

SPEC = RaceSpec(("ddp", "exdyna(0.05)"), "digits", 2, 1, None, 1.0, every=5)


def test_from_spec_to_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    race(SPEC, tmp_path / "new" / "out", ["gradtide", "race"])
    assert "raced to: held-out loss" in capsys.readouterr().out
    written = json.loads((tmp_path / "new" / "out" / "record.json").read_text())
    assert written["command"] == "gradtide race"
    for result in written["results"]:
        course = result["course"]
        assert course["seconds"][-1] >= SPEC.seconds > course["seconds"][-2]
        assert course["steps"][1] == SPEC.every
        assert course["loss"][-1] < course["loss"][0]
    ddp, exdyna = (
        result["course"]["sent_bytes"][-1] / result["course"]["steps"][-1]
        for result in written["results"]
    )
    assert exdyna < 0.5 * ddp


@pytest.mark.slow
def test_who_is_in_the_record_does_not_train_again(tmp_path: Path) -> None:
    spec = replace(SPEC, schemes=("wfbp", "ddp"), seconds=0.2, target="ddp")
    course = [Point(0.0, 0, 0, 2.4), Point(0.5, 7, 100, 0.9)]
    before = replace(spec, schemes=("ddp", "dear"))
    raced = standings({"ddp": course, "dear": course}, "ddp")
    path = tmp_path / "record.json"
    path.write_text(RaceRecord(origin(["gradtide", "before"]), before, raced).dumps())
    race(spec, tmp_path, ["gradtide", "race"], resume=True)
    after = resumed(spec, path)
    # Nothing that was trained is lost, whoever was named now.
    assert list(after.courses) == ["wfbp", "ddp", "dear"]
    assert after.courses["ddp"] == after.courses["dear"] == course
    assert after.courses["wfbp"][-1].steps >= SPEC.every
    assert [each["command"] for each in after.earlier] == [
        "gradtide before",
        "gradtide race",
    ]


def test_a_folder_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another"):
        race(SPEC, tmp_path / "file", ["gradtide"])
