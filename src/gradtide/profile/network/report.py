"""What a profile of a network shows: fits with their residuals, and the device."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gradtide.lab.record import milliseconds
from gradtide.plan.fit import Point
from gradtide.plan.measure import Row
from gradtide.plan.network import Line, Network
from gradtide.profile.network.run import Found

LINKS = {"inter": "between hosts", "intra": "within a host"}


def fits(found: Found) -> Table:
    """A row for each kind of request on each link; fits into 80 columns."""
    grid = Table(
        header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for heading in ("link", "as", "request"):
        grid.add_column(heading, no_wrap=True)
    headings = ("bytes", "alpha ms", "Mbit/s", "rms", "worst")
    for heading in headings:
        grid.add_column(heading, justify="right", no_wrap=True)
    for name, rows in found.rows.items():
        for row in rows:
            for request in dict.fromkeys(point.name for point in row.points):
                points = [point for point in row.points if point.name == request]
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
    grid = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("on this device, all ranks at once", no_wrap=True)
    for heading in ("us a call", "ns an element"):
        grid.add_column(heading, justify="right", no_wrap=True)
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


def _cells(row: Row, points: Sequence[Point]) -> list[str]:
    sizes = sorted({point.nbytes for point in points})
    errors = [abs(row.fit(point) / point.seconds - 1) for point in points]
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
