"""Pictures can be read on any background, and nothing of their texts is cut off."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from gradtide.lab import chart
from gradtide.lab.race import report as race
from gradtide.lab.race.standings import Point, standings
from gradtide.lab.spec import RaceSpec
from gradtide.planner.network import Network
from gradtide.scheme.recommended import candidates
from gradtide.simulate import report as simulated
from gradtide.simulate.grid import replayed, run

LONG = "topka2a(0.02, schedule='local', warmup=60, wire='e3m0')"


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What is written, and whether all of it is in the picture."""
    seen: list[tuple[str, bool]] = []
    save = Figure.savefig

    def kept(self: Figure, *args: object, **named: object) -> None:
        save(self, *args, **named)
        FigureCanvasAgg(self).draw()  # in the resolution that `bbox` has
        box = self.bbox
        parts = [*self.texts, *(t for each in self.legends for t in each.get_texts())]
        for axes in self.axes:
            parts += [axes.title, axes.xaxis.label, axes.yaxis.label]
        for text in parts:
            if not text.get_text().strip() or not text.get_visible():
                continue
            own = text.get_window_extent()
            whole = own.x0 >= -2 and own.y0 >= -2
            whole = whole and own.x1 <= box.x1 + 2 and own.y1 <= box.y1 + 2
            seen.append((text.get_text(), bool(whole)))

    monkeypatch.setattr(Figure, "savefig", kept)
    return seen


def test_the_race(tmp_path: Path, texts: list[tuple[str, bool]]) -> None:
    course = [Point(i, i, i * 1e6, 5.0 - i) for i in range(4)]
    names = ("ddp", LONG, LONG.replace("0.02", "0.01"))
    spec = RaceSpec(names, "some.module.of.mine:build_it", 4, 1, 5e7, 50.0, 10)
    record = race.RaceRecord({}, spec, standings(dict.fromkeys(names, course), "ddp"))
    race.draw(record, tmp_path / "race.png")
    check(tmp_path / "race.png", texts)


def test_the_maps_of_a_simulation(
    tmp_path: Path, texts: list[tuple[str, bool]]
) -> None:
    names = ["wfbp", LONG]
    schemes = {name: candidates()[name] for name in names}
    trace = replayed("gpt-30m", 100.0)
    grid = run(trace, Network.ideal(2, 1, 1e9), schemes, [2], [1e8])
    simulated.draw_crossovers(grid, tmp_path / "crossover.png")
    check(tmp_path / "crossover.png", texts)
    simulated.draw_efficiency(grid, tmp_path / "efficiency.png")
    check(tmp_path / "efficiency.png", texts)


def check(path: Path, texts: list[tuple[str, bool]]) -> None:
    assert texts
    assert all(whole for _, whole in texts), [t for t, whole in texts if not whole]
    found = image.imread(path)
    assert found.shape[2] == 4
    assert found[0, 0, 3] == 0  # no background
    texts.clear()


def test_texts_are_grey_but_for_those_on_a_colour(tmp_path: Path) -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.set_title("title")
    axes.text(0, 0, "in", gid=chart.INSIDE)
    chart.save(figure, tmp_path / "made.png")
    assert axes.title.get_color() == chart.GREY
    assert axes.texts[0].get_color() == "black"
    assert axes.get_xticklabels()[0].get_color() == chart.GREY


def test_a_simulations_table_is_whole_in_80_columns() -> None:
    schemes = {name: candidates()[name] for name in ("wfbp", LONG)}
    network = Network.ideal(2, 1, 1e9)
    grid = run(replayed("gpt-30m", 100.0), network, schemes, [2, 4, 8, 16], [1e7])
    file = StringIO()
    simulated.show(grid, Console(width=80, file=file))
    assert "…" not in file.getvalue()
    assert "topka2a(" in file.getvalue()
