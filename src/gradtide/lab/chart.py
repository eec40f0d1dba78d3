"""The comparison as a picture: where a step's time goes, and how short it could be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from gradtide.lab.record import Result, milliseconds

# Of Okabe and Ito, told apart by colour-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
# Of a step. The hatch marks what the comparison is about even in grey.
PARTS = (
    ("forward", "forward", "#56B4E9", ""),
    ("backward", "backward", "#0072B2", ""),
    ("select", "select", "#CC79A7", ""),
    ("exposed", "exposed communication", "#E69F00", "///"),
    ("apply", "optimizer", "#009E73", ""),
)


# Pictures have no background of their own: texts are to be read on white and on black.
GREY = "#808080"
PALE: dict[str, Any] = {"color": GREY, "alpha": 0.2}
WIDE = 110  # characters of a heading: more would not be in the picture
INSIDE = "inside"  # the gid of texts that stand on a colour, and keep their own


def save(figure: Any, path: Path) -> None:
    """Write the picture, to be read on any background."""
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.tick_params(which="both", color=GREY)
        for side in axes.spines.values():
            side.set_edgecolor(GREY)
    for text in figure.findobj(Text):
        if text.get_gid() != INSIDE:
            text.set_color(GREY)
    figure.savefig(path, dpi=150, transparent=True)


def panels(titles: Sequence[str], size: tuple[float, float], xlabel: str) -> Any:
    """Axes side by side, of milliseconds over something, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    found = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for title, axes in zip(titles, found, strict=True):
        axes.set(xscale="log", yscale="log", xlabel=xlabel)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(**PALE)
    found[0].set_ylabel("milliseconds")
    return found


def finish(axes: Any, heading: Sequence[str], ncols: int, path: Path) -> None:
    """Write the picture: below its heading, above a legend of what `axes` shows."""
    figure, shown = axes.figure, axes.get_legend_handles_labels()
    figure.suptitle("\n".join(fill(each, WIDE) for each in heading), fontsize=9)
    place = "outside lower center"
    figure.legend(*shown, loc=place, ncols=ncols, frameon=False, fontsize=9)
    save(figure, path)


def draw(rows: Sequence[Result], heading: Sequence[str], path: Path) -> None:
    """One bar of stacked parts per scheme, first on top, each limit as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.3 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    ends = np.zeros(len(rows))
    for part, label, colour, hatch in PARTS:
        values = np.array([1e3 * (getattr(r, f"{part}_seconds") or 0.0) for r in rows])
        if values.any():
            style: dict[str, Any] = {"color": colour, "hatch": hatch, "label": label}
            style |= {"edgecolor": "white", "linewidth": 0}
            axes.barh(range(len(rows)), values, 0.62, ends, **style)
        ends = ends + values
    for place, row in enumerate(rows):
        if row.limit_seconds is not None:
            line = [row.limit_seconds * 1e3] * 2, [place - 0.42, place + 0.42]
            known = None if place else "limit"
            axes.plot(*line, color=GREY, linewidth=2, label=known)
        caption = f"{milliseconds(row.step_seconds)} ms"
        if row.speedup_over_ddp is not None and row.scheme != "ddp":
            caption += f", {row.speedup_over_ddp:.2f} x ddp"
        end = max(row.step_seconds * 1e3, ends[place])
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        axes.annotate(caption, (end, place), xytext=(6, 0), fontsize=9, **beside)
    axes.set_yticks(range(len(rows)), [fill(row.scheme, 26) for row in rows])
    axes.invert_yaxis()
    longest = 1.3 * 1e3 * max(row.step_seconds for row in rows)
    axes.set(xlabel="milliseconds of one step", xlim=(0, longest), axisbelow=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", **PALE)
    finish(axes, heading, 6, path)
