"""A pilot is a race without slow links, and what it says of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradtide.cli import app
from gradtide.lab.race import pilot
from gradtide.planner.pilot import is_exact
from gradtide.scheme import parse


def call(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["pilot", *words], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_what_is_tried_begins_with_an_exact_one() -> None:
    exact, *others = pilot.usual()
    assert is_exact(exact)
    assert others
    assert not any(map(is_exact, others))
    assert all(parse(name).schedule.launch == "step" for name in others)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say what is trained"),
        (["--workload", "gpt-small", "--", "train.py"], "say what is trained"),
        (["--workload", "gpt-small", "--schemes", "wfbp,dear"], "one that is not"),
        (["--workload", "gpt-small", "--schemes", "topk"], "an exact one"),
        (["--workload", "gpt-small", "--schemes", "wfbp,nope"], "nope"),
        (["--workload", "nope"], "no workload"),
        (["--workload", "gpt-small", "--seconds", "0"], "seconds"),
    ],
)
def test_what_tells_nothing_is_refused_before_anything_trains(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("something trains")

    monkeypatch.setattr("gradtide.lab.race.laps.run", started)
    code, output = call("--out", str(tmp_path / "out"), *words)
    assert code, output
    assert said in output


def test_what_it_leaves_is_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [*range(10, 210, 10)]

    def course(factor: float) -> dict[str, Any]:
        return {"steps": steps, "loss": [3 - 0.4 * (factor * s) ** 0.2 for s in steps]}

    def race(spec: Any, out: Path, argv: Any) -> None:
        rows = [
            {"scheme": name, "course": course(1 if is_exact(name) else 0.8)}
            for name in spec.schemes
        ]
        out.mkdir()
        (out / "record.json").write_text(json.dumps({"results": rows}))

    monkeypatch.setattr(pilot.report, "race", race)
    out = tmp_path / "out"
    code, output = call("--workload", "gpt-small", "--out", str(out))
    assert code == 0, output
    assert "+25 %" in output
    assert f"--pilot {out / 'record.json'}" in output
