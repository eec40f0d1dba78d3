"""Selectors' times over sizes, beside the time on the wire that they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gradtide.lab.rate import format_rate
from gradtide.profile.selection.findings import Record
from gradtide.profile.selection.measure import COPY, TOPK

# The colours of Okabe and Ito, told apart by colour-blind readers.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_MARKERS = "os^vDPX*"


def draw(record: Record, path: Path) -> None:
    """A panel for each density: milliseconds over elements, both logarithmic.

    Below a grey line, which is the dense gradient on the wire at one rate, there is
    time for the sparse message.
    """
    densities = list(dict.fromkeys(row.density for row in record.results))
    figure = Figure(figsize=(2 + 3.6 * len(densities), 5), layout="constrained")
    panels = figure.subplots(1, len(densities), sharey=True, squeeze=False)[0]
    for density, axes in zip(densities, panels, strict=True):
        _lines(axes, record, density)
        _wire(axes, record)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"density {density:g}", fontsize=10)
        axes.set_xlabel("elements")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
    panels[0].set_ylabel("milliseconds")
    figure.suptitle(
        f"accumulate + select + take out on {record.device}, threads: {record.threads};"
        f" grey: dense all-reduce of {record.ranks} ranks on the wire",
        fontsize=9,
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=150)


def _lines(axes: Any, record: Record, density: float) -> None:
    for place, name in enumerate(dict.fromkeys(row.name for row in record.results)):
        rows = [r for r in record.results if (r.name, r.density) == (name, density)]
        yardstick = name in (TOPK, COPY)
        axes.plot(
            [row.n for row in rows],
            [row.seconds * 1e3 for row in rows],
            label=name,
            color="black" if yardstick else _COLOURS[place % len(_COLOURS)],
            linestyle={TOPK: "--", COPY: ":"}.get(name, "-"),
            marker=None if yardstick else _MARKERS[place % len(_MARKERS)],
            markersize=4,
        )


def _wire(axes: Any, record: Record) -> None:
    for rate in dict.fromkeys(each.rate_bits_per_s for each in record.dense):
        each = [time for time in record.dense if time.rate_bits_per_s == rate]
        sizes, times = [t.n for t in each], [t.seconds * 1e3 for t in each]
        axes.plot(sizes, times, color="0.6", linewidth=0.8)
        axes.annotate(format_rate(rate), (sizes[-1], times[-1]), fontsize=7, ha="right")
