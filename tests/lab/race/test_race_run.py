"""The whole race on loopback, from the spec to the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradtide.lab.race.report import race
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


def test_a_folder_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another"):
        race(SPEC, tmp_path / "file", ["gradtide"])
