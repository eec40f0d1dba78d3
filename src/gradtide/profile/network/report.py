"""What a profile of a network shows: fits with their residuals, device, and chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradtide.core.grouped import grouped
from gradtide.lab import tables
from gradtide.lab.chart import COLOURS, panels, save
from gradtide.lab.job import Tell
from gradtide.lab.record import milliseconds
from gradtide.planner.measure import Row
from gradtide.planner.measuring.fit import Point
from gradtide.planner.network import Line, Network
from gradtide.profile.network.run import Found

LINKS = {"inter": "between hosts", "intra": "within a host"}


@contextmanager
def shown(seconds: float) -> Iterator[Tell]:
    """A line on standard error, while there is a terminal; gone at the end."""
    words = TextColumn(f"of about {seconds:g} s  {{task.description}}")
    parts, console = (SpinnerColumn(), TimeElapsedColumn(), words), Console(stderr=True)
    with Progress(*parts, console=console, transient=True) as spinner:
        task = spinner.add_task("starting")
        yield lambda words: spinner.update(task, description=words)


def fits(found: Found) -> Table:
    """A row for each kind of request on each link; fits into 80 columns."""
    grid = tables.grid(
        *map(tables.name, ("link", "as", "request")),
        *map(tables.number, ("bytes", "alpha ms", "Mbit/s", "rms", "worst")),
        padding=(0, 1, 0, 0),
    )
    for name, rows in found.rows.items():
        for row in rows:
            for request, points in _requests(row).items():
                grid.add_row(name, row.field or "(ring)", request, *_cells(row, points))
        grid.add_section()
    return grid


def notes(found: Found) -> list[str]:
    """What the tables do not say: what was left out, and what is far off."""
    told = [
        "inter: between hosts; intra: within a host. alpha: seconds of a start; "
        "Mbit/s: 8 / beta; rms: root mean square of the relative errors of the fit of "
        "all requests that travel alike; worst: the largest of a request's own."
    ]
    for name, rows in found.rows.items():
        for row in rows:
            if row.dropped:
                sizes = sorted({point.nbytes for point in row.dropped})
                told.append(
                    f"{LINKS[name]}, {row.field}: {len(row.dropped)} points of "
                    f"{sizes[0]:,} to {sizes[-1]:,} bytes were left out: faster than "
                    "the link's rate, they had passed in a burst."
                )
    return told


def device(network: Network) -> Table:
    """The costs beside the wire."""
    grid = tables.grid(
        tables.name("on this device, all ranks at once"),
        *map(tables.number, ("us a call", "ns an element")),
    )
    found = network.device
    lines = {
        "take in a gradient": found.take_in,
        **{f"select by {name}": line for name, line in found.select.items()},
        "touch an entry of a bucket": found.scatter,
        "touch an entry beside others": found.nearby or found.scatter,
        "optimizer (SGD)": found.optimizer,
        "post a request": Line(found.request, 0.0),
    }
    for name, line in lines.items():
        grid.add_row(name, f"{line.call * 1e6:.1f}", f"{line.each * 1e9:.3g}")
    grid.caption = (
        f"computing takes {network.interference:.2f} x as long while requests are "
        "answered"
    )
    if network.processors is not None:
        grid.caption += (
            f"; a rank has {network.processors:.3g} processors, busy for "
            f"{network.occupancy:.0%} of the time at most"
        )
    return grid


def draw(found: Found, path: Path) -> None:
    """Times over sizes: points, those left out hollow, and fits; a panel a link."""
    size, xlabel = (1 + 5.5 * len(found.rows), 4.5), "bytes of a rank's tensor"
    links = panels([LINKS[name] for name in found.rows], size, xlabel)
    for rows, axes in zip(found.rows.values(), links, strict=True):
        requests = dict.fromkeys(request for row in rows for request in _requests(row))
        colours = dict(zip(requests, COLOURS, strict=False))
        for row in rows:
            for point in (*row.points, *row.dropped):
                style = {"color": colours.get(point.name, "0.5"), "marker": "o"}
                style["fillstyle"] = "none" if point in row.dropped else "full"
                axes.plot(point.nbytes, point.seconds * 1e3, markersize=4, **style)
            for request, points in _requests(row).items():
                line = {(p.nbytes, 1e3 * row.fit(p.carried, p.starts)) for p in points}
                xs, ys = zip(*sorted(line), strict=True)
                axes.plot(xs, ys, color=colours[request], linewidth=1, label=request)
        axes.legend(frameon=False, fontsize=8)
    save(links[0].figure, path)


def _requests(row: Row) -> dict[str, list[Point]]:
    """The points of each kind of request."""
    return grouped(row.points, lambda point: point.name)


def _cells(row: Row, points: Sequence[Point]) -> list[str]:
    sizes = sorted({point.nbytes for point in points})
    errors = [abs(row.fit(p.carried, p.starts) / p.seconds - 1) for p in points]
    rate = f"{8e-6 / row.fit.beta:.4g}" if row.fit.beta else "free"
    return [
        f"{_short(sizes[0])}-{_short(sizes[-1])}",
        milliseconds(row.fit.alpha),
        rate,
        f"{row.fit.residual:.1%}" if row.field else "",
        f"{max(errors):.1%}",
    ]


def _short(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g}M" if nbytes >= 1e6 else f"{nbytes / 1e3:.3g}k"
