"""The picture of a race: courses, and who was there when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from gradtide.lab.race.report import RaceRecord, draw
from gradtide.lab.race.standings import Point, standings
from gradtide.lab.spec import RaceSpec

COURSES = {
    "ddp": [Point(0, 0, 0, 5.0), Point(10, 10, 5e7, 4.0), Point(20, 20, 1e8, 3.0)],
    "one": [Point(0, 0, 0, 5.0), Point(30, 10, 1e6, 3.5)],  # never there
}


def test_every_look_is_drawn_and_every_arrival_has_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[Any, Any, str]] = []
    plot = Axes.plot

    def kept(self: Axes, x: Any, y: Any, **style: Any) -> Any:
        lines.append((x, y, style.get("marker", "-")))
        return plot(self, x, y, **style)

    monkeypatch.setattr(Axes, "plot", kept)
    spec = RaceSpec(("ddp", "one"), "gpt-small", 4, 1, 5e7, 20.0)
    record = RaceRecord({}, spec, standings(COURSES, "ddp"))
    there = record.leader.arrival
    assert there is not None
    draw(record, tmp_path / "race.png")
    assert ([0, 10, 20], [5.0, 4.0, 3.0], "-") in lines
    assert ([0, 50.0, 100.0], [5.0, 4.0, 3.0], "-") in lines
    assert ([0, 30], [5.0, 3.5], "-") in lines
    assert [line for line in lines if line[2] == "o"] == [
        (there.seconds, record.target, "o"),
        (there.sent_bytes / 1e6, record.target, "o"),
    ]
