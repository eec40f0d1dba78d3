"""A grid as a table, as JSON, and as pictures: how schemes scale, which wins where."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import Console

from gradtide.lab import chart, tables
from gradtide.planner.data import document
from gradtide.planner.report import stages, told_of
from gradtide.simulate.grid import Grid, rate_name

FORMAT = "gradtide simulation"
# Paul Tol's muted ones, behind Okabe and Ito's: told apart by colour-blind readers.
MUTED = ("#332288", "#88CCEE", "#117733", "#882255", "#999933", "#AA4499", "#44AA99")
COLOURS = (*chart.COLOURS, *MUTED, "#DDCC77", "#666666")
LEAST, LINE = 6.5, 0.22  # inches: of a width, and of a line of the legend
LETTERS = 90  # of a title in that width
MARKERS = "os^Dv<>pPX*hd8"


def show(grid: Grid, console: Console) -> None:
    """A table for every rate: milliseconds a step, and the efficiency in percent."""
    console.print(f"device: {told_of(grid.network, grid.trace)}", highlight=False)
    for rate in grid.rates:
        name, link = grid.trace.name, rate_name(rate)
        table = tables.grid(
            tables.folded("scheme", list(grid.schemes)),
            *(tables.number(f"{ranks} ranks") for ranks in grid.ranks),
            title=f"{name}, {link} a host: ms a step (efficiency)",
            title_justify="left",
        )
        for scheme in grid.schemes:
            table.add_row(scheme, *(_entry(grid, scheme, n, rate) for n in grid.ranks))
        console.print(table)
        for ranks in grid.ranks:
            curved = stages({c.scheme: c.prediction for c in grid.at(ranks, rate)})
            if curved is not None:
                console.print(f"{ranks} ranks, {link}: stages of K-FAC")
                console.print(curved)


def _entry(grid: Grid, name: str, ranks: int, rate: float | None) -> str:
    cell = next(c for c in grid.at(ranks, rate) if c.scheme == name)
    ms = 1e3 * cell.prediction.step
    whole = f"{ms:.0f}" if ms >= 1000 else f"{ms:.4g}"
    text = f"{whole} ({100 * cell.efficiency:.0f} %)"
    return f"[bold]{text}[/bold]" if cell == grid.fastest(ranks, rate) else text


def record(grid: Grid, command: list[str]) -> dict[str, Any]:
    """Everything, for JSON: seconds, bytes, bits/s."""
    return {
        "command": command,
        "trace": grid.trace.name,
        "device": grid.network.device.name or None,
        "compute_seconds": grid.trace.compute,
        "gradient_bytes": grid.trace.nbytes,
        "network": asdict(grid.network),
        "schemes": {name: repr(scheme) for name, scheme in grid.schemes.items()},
        "cells": [
            {
                "scheme": cell.scheme,
                "ranks": cell.ranks,
                "rate": cell.rate,
                "efficiency": cell.efficiency,
                **asdict(cell.prediction),
            }
            for cell in grid.cells
        ],
    }


def write(grid: Grid, folder: Path, command: list[str]) -> list[Path]:
    """The JSON and both pictures; returns where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / n for n in ("simulate.json", "efficiency.png", "crossover.png")]
    text = document.dumps(FORMAT, record(grid, command))
    paths[0].write_text(text, encoding="utf-8")
    draw_efficiency(grid, paths[1])
    draw_crossovers(grid, paths[2])
    return paths


def draw_efficiency(grid: Grid, path: Path) -> None:
    """A panel a rate: the efficiency of every scheme over the number of ranks."""
    from matplotlib.figure import Figure

    count = len(grid.rates)
    columns = 2 if count in (2, 4) else min(count, 3)
    rows = -(-count // columns)
    size = (max(4 * columns, LEAST), 3.2 * rows + 1 + LINE * len(grid.schemes))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, rate in zip(panels.flat, grid.rates, strict=False):
        for i, name in enumerate(grid.schemes):
            cells = [c for c in grid.cells if (c.scheme, c.rate) == (name, rate)]
            xs, ys = zip(*((c.ranks, 100 * c.efficiency) for c in cells), strict=True)
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            label = name if axes is panels.flat[0] else None
            axes.plot(xs, ys, color=colour, marker=marker, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(grid.ranks), [str(n) for n in grid.ranks], rotation=45)
        axes.tick_params(labelbottom=True)
        axes.set(ylim=(0, 105), axisbelow=True)
        axes.set_title(rate_name(rate), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(**chart.PALE)
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("ranks")
    figure.supylabel("scaling efficiency, % of one rank alone")
    figure.suptitle(f"{grid.trace.name}: a rank's step without exchange, over its step")
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    chart.save(figure, path)


def _lighter(colour: str) -> tuple[float, float, float]:
    """Opaque, and so pale that black numbers can be read on it."""
    from matplotlib.colors import to_rgb

    red, green, blue = (0.25 + 0.75 * part for part in to_rgb(colour))
    return red, green, blue


def draw_crossovers(grid: Grid, path: Path) -> None:
    """A field for every cluster, in the colour of the scheme that is the fastest.

    The numbers say how many times as long the first scheme takes.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = list(grid.schemes)
    winners = [[grid.fastest(n, rate) for n in grid.ranks] for rate in grid.rates]
    numbers = [[names.index(cell.scheme) for cell in row] for row in winners]
    present = sorted({number for row in numbers for number in row})
    height = 2.4 + 0.6 * len(grid.rates) + LINE * len(present)
    size = (max(2.5 + 0.9 * len(grid.ranks), LEAST), height)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    colours = [_lighter(COLOURS[i % len(COLOURS)]) for i in range(len(names))]
    norm = {"cmap": ListedColormap(colours), "vmin": -0.5, "vmax": len(names) - 0.5}
    where: dict[str, Any] = {"aspect": "auto", "origin": "lower"}
    axes.imshow(numbers, **(where | norm))
    for y, (rate, row) in enumerate(zip(grid.rates, winners, strict=True)):
        for x, (ranks, cell) in enumerate(zip(grid.ranks, row, strict=True)):
            slower = grid.at(ranks, rate)[0].prediction.step / cell.prediction.step
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
            axes.text(x, y, f"{slower:.2f}", gid=chart.INSIDE, **style)
    axes.set_xticks(range(len(grid.ranks)), [str(n) for n in grid.ranks])
    axes.set_yticks(range(len(grid.rates)), [rate_name(rate) for rate in grid.rates])
    axes.set(xlabel="ranks", ylabel="rate of a host's link")
    title = f"{grid.trace.name}: the fastest, and {names[0]}'s step over its own"
    figure.suptitle(fill(title, LETTERS), fontsize=9)
    patches = [Patch(color=colours[i], label=names[i]) for i in present]
    where = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
    figure.legend(handles=patches, **where)
    chart.save(figure, path)
