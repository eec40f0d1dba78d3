"""`gradtide profile network`: on loopback, its reports, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from gradtide.planner.measure import Row
from gradtide.planner.measuring.fit import Point
from gradtide.planner.network import Network, Rate, load
from gradtide.profile.cli import app
from gradtide.profile.network.report import device, draw, fits, notes
from gradtide.profile.network.run import Found

pytestmark = pytest.mark.alone


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["network", *words])


@pytest.mark.slow
def test_on_loopback(tmp_path: Path) -> None:
    out, chart = tmp_path / "network.json", tmp_path / "chart.png"
    words = ("--hosts", "2", "--rate", "none", "--seconds", "1")
    result = call(*words, "--out", str(out), "--chart", str(chart))
    assert result.exit_code == 0, result.output
    for word in ("between hosts", "ReduceScatter", "AllToAll", "Swap", "select by"):
        assert word in result.output
    found = load(out)
    assert (found.hosts, found.ranks_per_host, found.rate) == (2, 1, None)
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what to measure: --hosts 8 --rate 100mbit"),
        (("--hosts", "2", "--rate", "fast"), "'fast' is not a rate"),
        (("--hosts", "1", "--rate", "none"), "one rank has nobody to talk to"),
        (("--hosts", "2", "--rate", "none", "--seconds", "0"), "measuring takes time"),
        (("--hosts", "2", "--rate", "none", "--out", "/none/x"), "cannot be written"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def _found() -> Found:
    def points(*sizes: int) -> tuple[Point, ...]:
        return tuple(
            Point("AllToAll", n, 3.0, n * 0.75, 1e-3 + 1e-8 * n) for n in sizes
        )

    row = Row("direct", Rate(1e-3 / 3, 1.3e-8, 0.012), points(10**5, 10**6), points(50))
    return Found(Network.ideal(4, 1, 1e9), {"inter": [row], "intra": [row]})


def test_reports(tmp_path: Path) -> None:
    found = _found()
    console = Console(record=True, width=80)
    console.print(fits(found), device(found.network))
    shown = console.export_text()
    assert "intra" in shown
    assert "100k-1M" in shown
    assert "615.4" in shown
    assert "…" not in shown
    assert "1.2%" in shown
    assert "1 points of 50 to 50 bytes were left out" in " ".join(notes(found))
    draw(found, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000
