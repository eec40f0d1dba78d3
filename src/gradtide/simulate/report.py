"""A grid as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from gradtide.lab import tables
from gradtide.planner import document
from gradtide.planner.report import stages
from gradtide.simulate.grid import Grid, rate_name

FORMAT = "gradtide simulation"


def show(grid: Grid, console: Console) -> None:
    """A table for every rate: milliseconds a step, and the efficiency in percent."""
    for rate in grid.rates:
        name, link = grid.trace.name, rate_name(rate)
        table = tables.grid(
            tables.name("scheme"),
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
    text = f"{1e3 * cell.prediction.step:.4g} ({100 * cell.efficiency:.0f} %)"
    return f"[bold]{text}[/bold]" if cell == grid.fastest(ranks, rate) else text


def record(grid: Grid, command: list[str]) -> dict[str, Any]:
    """Everything, for JSON: seconds, bytes, bits/s."""
    return {
        "command": command,
        "trace": grid.trace.name,
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
    from gradtide.simulate.chart import draw_crossovers, draw_efficiency

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / n for n in ("simulate.json", "efficiency.png", "crossover.png")]
    text = document.dumps(FORMAT, record(grid, command))
    paths[0].write_text(text, encoding="utf-8")
    draw_efficiency(grid, paths[1])
    draw_crossovers(grid, paths[2])
    return paths
