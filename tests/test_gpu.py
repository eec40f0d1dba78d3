"""`benchmarks/gpu`, walked through without a GPU: sections, figures and bars."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # ranks find the package by its name, too
results: Any = import_module("gpu.results")
ranks: Any = import_module("gpu.ranks")
setting: Any = import_module("gpu.setting")
run: Any = import_module("gpu.run")


def walk(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The record, and what was printed."""
    command = [sys.executable, "benchmarks/gpu", "--device", "cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--out", str(folder), *options],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return json.loads((folder / "record.json").read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.alone
def test_sections_are_walked_through_and_gone_on_with(tmp_path: Path) -> None:
    first, told = walk(tmp_path, "--sections", "selection,curvature")
    assert first["command"].startswith("python benchmarks/gpu --device cpu --tiny")
    assert {"commit", "card", "driver", "torch", "machine"} <= first.keys()
    assert list(first["sections"]) == ["selection", "curvature"]
    entries = [e for s in first["sections"].values() for e in s["figures"].values()]
    assert len(entries) == 10
    assert all("value" in each and each["run"] == 0 for each in entries)
    assert "a step without its stages, of wfbp's" in told

    figures = first["sections"]["curvature"]["figures"]
    figures["none"] = {"failed": "cut off", "run": 0}
    del figures["factors"]
    (tmp_path / "record.json").write_text(json.dumps(first))
    second, told = walk(tmp_path, "--sections", "selection,curvature")
    assert len(second["runs"]) == 2
    again = second["sections"]["curvature"]["figures"]
    runs = {name: entry["run"] for name, entry in again.items()}
    names = ("wfbp", "none", "factors", "factors and inverses")
    assert runs == dict(zip(names, (0, 1, 1, 0), strict=True))
    assert all("value" in entry for entry in again.values())
    assert second["sections"]["selection"] == first["sections"]["selection"]


def test_every_section_has_its_measure_and_bars_of_figures_that_can_be() -> None:
    for name, section in run.SECTIONS.items():
        assert callable(section.module.measure), name
        assert all(bar.most < math.inf or bar.least > 0 for bar in section.module.BARS)


def test_what_is_there_is_not_measured_twice_and_what_failed_is(tmp_path: Path) -> None:
    path, calls = tmp_path / "record.json", list[str]()

    def call(name: str, fails: bool = False) -> Any:
        def figure() -> dict[str, str]:
            calls.append(name)
            if fails:
                raise ValueError("not today")
            return {"of": name}

        return figure

    results.begin_run(path, {"command": "first"})
    figures = {"a": call("a"), "b": call("b", fails=True), "c": call("c")}
    results.Book(path, "s").measure(figures)
    results.Book(path, "s").begin("d")  # and then its process was ended
    assert calls == ["a", "b", "c"]
    entries = results.Book(path, "s").entries
    assert entries["a"]["value"] == {"of": "a"}
    assert "ValueError: not today" in entries["b"]["failed"]
    assert entries["d"]["failed"] == results.CUT_OFF

    calls.clear()
    results.begin_run(path, {"command": "second"})
    book = results.Book(path, "s")
    assert book.left("abcde") == ["e", "b", "d"]
    book.measure({name: call(name) for name in "abcde"})
    assert calls == ["e", "b", "d"]
    runs = {name: entry["run"] for name, entry in book.entries.items()}
    assert runs == {"a": 0, "c": 0, "e": 1, "b": 1, "d": 1}
    assert results.read(path)["command"] == "second"


def test_a_device_that_is_broken_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    results.begin_run(path, {})

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(SystemExit):
        results.Book(path, "s").measure({"a": broken, "b": dict})
    assert results.Book(path, "s").left("ab") == ["b", "a"]


@pytest.mark.parametrize(
    ("entries", "number", "verdict"),
    [
        ({"x": {"value": {"ms": 3.0}}, "y": {"value": {"ms": 3.0}}}, 1.0, "met"),
        ({"x": {"value": {"ms": 6.0}}, "y": {"value": {"ms": 3.0}}}, 2.0, "missed"),
        ({"x": {"value": {"ms": None}}, "y": {"value": {"ms": 3.0}}}, None, "missed"),
        ({"x": {"value": {"ms": 3.0}}}, None, "open"),
        ({"y": {"value": {"ms": 3.0}}}, None, "open"),
        ({"x": {"failed": "so"}, "y": {"value": {"ms": 3.0}}}, None, "failed"),
        ({"x": {"skipped": "so"}}, None, "open"),
    ],
)
def test_a_bar_is_met_missed_open_or_failed(
    entries: Any, number: float | None, verdict: str
) -> None:
    bar = results.Bar("a step, of y's", "x", "ms", 1.02, per=("y", "z"))
    row = bar.row(entries, tiny=False)
    assert (row["number"], row["verdict"], row["bar"]) == (number, verdict, "<= 1.02")


def test_a_walk_through_judges_only_what_is_right() -> None:
    entries = {"x": {"value": {"ms": 9.0, "alike": False}}}
    assert results.Bar("", "x", "ms", 1.0).row(entries, True)["verdict"] == "open"
    assert results.right("", "x", "alike").row(entries, True)["verdict"] == "missed"


def work(names: Sequence[str]) -> None:
    with ranks.joined(setting.Setting("cpu", tiny=True)) as groups:

        def call(name: str) -> int:
            if name == "raises" and groups.rank == 1:
                raise ValueError("on one rank")
            if name == "ends":
                os._exit(5)
            return len(name)

        ranks.told_each(groups, names, call, limit=20)


@pytest.mark.slow
@pytest.mark.waits
def test_ranks_go_on_without_what_fails(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    results.begin_run(path, {})
    book = results.Book(path, "s")
    names = ["raises", "good", "ends", "better"]
    ranks.measure(book, ranks.Cluster(2), work, names)
    assert book.values == {"good": 4, "better": 6}
    assert "rank 1: ValueError: on one rank" in book.entries["raises"]["failed"]
    assert "exit code 5" in book.entries["ends"]["failed"]
