"""Grids: what is read, what is refused, and what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradtide.cli import app
from gradtide.lab.workloads.replay import STEP_MS
from gradtide.lab.workloads.shapes import ARCHITECTURES, units
from gradtide.planner.network import Network
from gradtide.planner.trace import load
from gradtide.scheme import parse
from gradtide.simulate.grid import read_network, read_trace, run

SCHEMES = {name: parse(name) for name in ("wfbp", "dear", "topk")}
RATES = (1e8, 1e11)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_replays_trace_has_its_tensors_and_its_time(architecture: str) -> None:
    trace = read_trace(f"replay:{architecture}")
    parts = units(architecture)
    assert len(trace.units) == sum(len(part.shapes) for part in parts)
    assert trace.compute == pytest.approx(STEP_MS[architecture] / 1e3)
    assert trace.backward == pytest.approx(2 * trace.forward)
    names = [f"{part.name}.{name}" for part in parts for name, _ in part.shapes]
    assert [trace.units[i].name for i in trace.forward_order] == names
    layers = [part.name for part in parts if part.shapes]
    ready = [unit.name.rpartition(".")[0] for unit in trace.units]
    assert list(dict.fromkeys(ready)) == layers[::-1]


def test_a_grid_has_a_cell_for_everything_and_knows_the_fastest() -> None:
    trace, network = read_trace("replay:resnet50"), read_network("1gbit")
    grid = run(trace, network, SCHEMES, [4, 8], RATES)
    assert len(grid.cells) == 2 * 2 * 3
    assert grid.fastest(8, 1e8).scheme == "topk"
    assert grid.fastest(8, 1e11).scheme in ("wfbp", "dear")
    alone = grid.trace.compute
    assert alone > trace.compute  # by the device's optimizer
    for cell in grid.cells:
        assert cell.efficiency == pytest.approx(alone / cell.prediction.step)
        assert cell.prediction.buckets > 1
    same = run(trace, network, {"wfbp": SCHEMES["wfbp"]}, [4])
    assert same.rates == [1e9]


def test_files_are_read(tmp_path: Path) -> None:
    network = Network.ideal(4, 2, 1e9)
    network.save(tmp_path / "n.json")
    assert read_network(str(tmp_path / "n.json")) == network
    trace = read_trace("replay:resnet50", 100)
    trace.save(tmp_path / "t.json")
    assert read_trace(str(tmp_path / "t.json")) == load(tmp_path / "t.json")
    with pytest.raises(ValueError, match="step-ms"):
        read_trace(str(tmp_path / "t.json"), 100)


ARGUMENTS = ["--trace", "replay:resnet50", "--ranks", "4,8", "--schemes", "wfbp,topk"]


def simulated(out: Path, *more: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["simulate", "--out", str(out), *ARGUMENTS, *more])
    return done.exit_code, done.output


def test_the_command_writes_a_table_json_and_pictures(tmp_path: Path) -> None:
    code, output = simulated(tmp_path / "out", "--rates", "100mbit,10gbit")
    assert code == 0, output
    assert "100mbit a host" in output
    assert "8 ranks" in output
    rows = [line for line in output.splitlines() if line.split()[:1] == ["wfbp"]]
    assert [len(re.findall(r"\(\d+ %\)", row)) for row in rows] == [2, 2]
    found = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert len(found["cells"]) == 2 * 2 * 2
    assert found["schemes"]["wfbp"] == repr(parse("wfbp"))
    for name in ("efficiency.png", "crossover.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (("--ranks", "four"), "commas"),
        (("--ranks", "6", "--ranks-per-host", "4"), "multiples"),
        (("--ranks", "1"), "2 to 131072"),
        (("--ranks", "131073"), "2 to 131072"),
        (("--network", "fast"), "not a rate"),
        (("--network", "none"), "without a limit"),
        (("--network", "missing.json"), "cannot read"),
        (("--rates", "none"), "without a limit"),
        (("--trace", "replay:alexnet"), "replay:resnet50"),
        (("--trace", "missing.json"), "cannot read"),
        (("--schemes", "magic"), "magic"),
        (("--step-ms", "0"), "step_ms"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    more: tuple[str, ...], match: str, tmp_path: Path
) -> None:
    code, output = simulated(tmp_path / "out", *more)
    assert code == 2
    assert match in output
    assert not (tmp_path / "out").exists()


def test_stages_of_k_fac_are_shown_and_written(tmp_path: Path) -> None:
    code, told = simulated(tmp_path, "--schemes", "wfbp,pad_kfac", "--ranks", "4")
    assert code == 0
    assert "stages of K-FAC" in told
    plain, curved = json.loads((tmp_path / "simulate.json").read_text())["cells"]
    assert plain["breakdown"] is None
    assert sum(curved["breakdown"].values()) == pytest.approx(curved["step"])
    assert curved["busy"]["factor_comm"] > 0


def test_a_trace_without_layers_is_refused(tmp_path: Path) -> None:
    words = ("--schemes", "dp_kfac", "--trace", "replay:gpt2")
    code, told = simulated(tmp_path, *words)
    assert code == 2
    assert "gradtide profile trace" in told.replace("\n", " ")
