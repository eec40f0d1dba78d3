"""`gradtide profile`: what it prints, what it refuses, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from gradtide.profile.cli import app
from gradtide.profile.selection import run as module
from gradtide.selectors import SELECTORS


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["selection", *words])


def test_quick(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    words = ("--quick", "--sizes", "1e4,4e4,1e8", "--densities", ".01,.5")
    result = call(*words, "--ranks", "2", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == threads
    record = json.loads((tmp_path / "record.json").read_text())
    names = [selector.__name__ for selector in SELECTORS] + ["torch.topk", "copy"]
    asked = [
        (n, d, name) for n in (10_000, 40_000) for d in (0.01, 0.5) for name in names
    ]
    rows = record["results"]
    assert [(row["n"], row["density"], row["name"]) for row in rows] == asked
    for row in rows:
        assert row["rounds"] <= 3
        if row["name"] in names[:-2]:
            assert row["realised_density"] == pytest.approx(row["density"], rel=0.5)
    assert all(name in result.output for name in names)
    assert "40,000 elements" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sizes", "many"), "'many': write numbers"),
        (("--sizes", "0"), "1 or more each"),
        (("--sizes", "1e8", "--quick"), "up to 1e6"),
        (("--densities", "0,.1"), "above 0, at most 1"),
        (("--densities", "2"), "above 0, at most 1"),
        (("--rates", "fast"), "'fast' is not a rate"),
        (("--rates", "none"), "no time on the wire"),
        (("--ranks", "1"), "exchange nothing"),
        (("--threads", "0"), "at least 1"),
        (("--repeats", "0"), "at least 1"),
        (("--device", "abacus"), "Use cpu, or cuda"),
        (("--sizes", "1e14"), "leave the largest of --sizes out"),
    ],
)
def test_refused_before_anything_is_measured(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module, "measure")
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.output
