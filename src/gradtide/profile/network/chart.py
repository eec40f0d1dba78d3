"""Times over sizes, measured and fitted, both logarithmic."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from gradtide.profile.network.report import LINKS
from gradtide.profile.network.run import Found

# The colours of Okabe and Ito, told apart by colour-blind readers.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def draw(found: Found, path: Path) -> None:
    """A panel for each link: points, those left out hollow, and the fits."""
    figure = Figure(figsize=(1 + 5.5 * len(found.rows), 4.5), layout="constrained")
    panels = figure.subplots(1, len(found.rows), sharey=True, squeeze=False)[0]
    for (name, rows), axes in zip(found.rows.items(), panels, strict=True):
        requests = dict.fromkeys(point.name for row in rows for point in row.points)
        colours = dict(zip(requests, _COLOURS, strict=False))
        for row in rows:
            for point in (*row.points, *row.dropped):
                axes.plot(
                    point.nbytes,
                    point.seconds * 1e3,
                    marker="o",
                    markersize=4,
                    color=colours.get(point.name, "0.5"),
                    fillstyle="none" if point in row.dropped else "full",
                )
            for request in dict.fromkeys(point.name for point in row.points):
                line = sorted(
                    {
                        (point.nbytes, row.fit(point) * 1e3)
                        for point in row.points
                        if point.name == request
                    }
                )
                xs, ys = zip(*line, strict=True)
                axes.plot(xs, ys, color=colours[request], linewidth=1, label=request)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(LINKS[name], fontsize=10)
        axes.set_xlabel("bytes of a rank's tensor")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("milliseconds")
    figure.savefig(path, dpi=150)
