"""The race as a picture: loss over time, and over what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradtide.lab.chart import COLOURS
from gradtide.lab.race.standings import Standing

SHOWN = 0.4  # of the way down to the target; above, all fall alike


def draw(
    standings: Sequence[Standing],
    labels: Sequence[str],
    target: float,
    heading: Sequence[str],
    path: Path,
) -> None:
    """One line for each contestant, and a dot where it had the loss `target`."""
    from matplotlib.figure import Figure

    rows = (len(standings) + 1) // 2  # of the legend
    figure = Figure(figsize=(9, 4.2 + 0.22 * rows), layout="constrained")
    over_time, over_bytes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, (standing, label) in enumerate(zip(standings, labels, strict=True)):
        style = {"color": COLOURS[place % len(COLOURS)], "label": label}
        losses = [point.loss for point in standing.points]
        seconds = [point.seconds for point in standing.points]
        megabytes = [point.sent_bytes / 1e6 for point in standing.points]
        _line(over_time, seconds, losses, style)
        _line(over_bytes, megabytes, losses, style)
        if standing.arrival is not None:
            there = standing.arrival
            dot = {"color": style["color"], "marker": "o", "zorder": 3}
            over_time.plot(there.seconds, target, **dot)
            over_bytes.plot(there.sent_bytes / 1e6, target, **dot)
    for axes in (over_time, over_bytes):
        axes.axhline(target, color="0.4", linewidth=1, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
        axes.set_xlim(left=0)
    limits = _limits(standings, target)
    over_time.set(xlabel="seconds of training", ylabel="held-out loss", ylim=limits)
    over_bytes.set(xlabel="megabytes sent by a rank")
    figure.suptitle("\n".join(heading), fontsize=9, wrap=True)
    handles, names = over_time.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=150)


def _line(axes: Any, x: list[float], losses: list[float], style: Any) -> None:
    axes.plot(x, losses, linewidth=1.8, **style)


def _limits(standings: Sequence[Standing], target: float) -> tuple[float, float]:
    losses = [p.loss for standing in standings for p in standing.points]
    top = target + SHOWN * (max(losses) - target)
    return min(losses) - 0.04 * (top - min(losses)), top
