"""The comparison as a picture: where a step's time goes, and how short it could be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure

from gradtide.lab.record import Result, milliseconds

# The colours of Okabe and Ito, told apart by colour-blind readers; the hatch marks what
# the comparison is about even in grey.
_PARTS = (
    ("forward", "#56B4E9", ""),
    ("backward", "#0072B2", ""),
    ("select", "#CC79A7", ""),
    ("exposed", "#E69F00", "///"),
    ("apply", "#009E73", ""),
)
_LABELS = {"exposed": "exposed communication", "apply": "optimizer"}
_INCHES_A_BAR = 0.5


def draw(rows: Sequence[Result], heading: Sequence[str], path: Path) -> None:
    """One bar of stacked parts per scheme, first on top, each limit as a black line."""
    figure = Figure(figsize=(9, 2.3 + _INCHES_A_BAR * len(rows)), layout="constrained")
    axes = figure.subplots()
    _bars(axes, rows)
    for place, row in enumerate(rows):
        _limit(axes, place, row)
        axes.annotate(
            _caption(row),
            (max(row.step_seconds, _stacked(row)) * 1e3, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(rows)), [fill(row.scheme, 26) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one step")
    axes.set_xlim(0, 1.3 * 1e3 * max(row.step_seconds for row in rows))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    figure.suptitle("\n".join(heading), fontsize=9, wrap=True)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _bars(axes: Any, rows: Sequence[Result]) -> None:
    left = [0.0] * len(rows)
    for part, colour, hatch in _PARTS:
        values = [(getattr(row, f"{part}_seconds") or 0.0) * 1e3 for row in rows]
        if any(values):
            label = _LABELS.get(part, part)
            axes.barh(
                range(len(rows)),
                values,
                left=left,
                height=0.62,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0,
                label=label,
            )
        left = [a + b for a, b in zip(left, values, strict=True)]


def _limit(axes: Any, place: int, row: Result) -> None:
    if row.limit_seconds is not None:
        axes.plot(
            [row.limit_seconds * 1e3] * 2,
            [place - 0.42, place + 0.42],
            color="black",
            linewidth=2,
            label="limit" if place == 0 else None,
        )


def _stacked(row: Result) -> float:
    parts = (getattr(row, f"{part}_seconds") for part, _, _ in _PARTS)
    return sum(seconds or 0.0 for seconds in parts)


def _caption(row: Result) -> str:
    caption = f"{milliseconds(row.step_seconds)} ms"
    if row.speedup_over_ddp is not None and row.scheme != "ddp":
        caption += f", {row.speedup_over_ddp:.2f} x ddp"
    return caption
