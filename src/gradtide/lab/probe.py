"""What an emulated cluster really delivers: bandwidth and round trips."""

from __future__ import annotations

import json
import sys

from rich.table import Table

from gradtide.lab import talker
from gradtide.lab.cluster import Cluster
from gradtide.lab.launch import launch
from gradtide.lab.rate import format_rate

# A full packet's share that is not headers (TCP/IP with timestamps, and Ethernet, which
# tbf counts too).
_HEADERS, _ETHERNET = 52, 14


def probe(cluster: Cluster, seconds: float = 1.0) -> dict[str, float]:
    """Bits/s by pattern of traffic, and under "idle" and "full" seconds a round trip.

    One rank a host whatever the cluster says; takes about six times `seconds`.
    """
    if cluster.hosts < 2:
        raise ValueError("a single host has nobody to talk to: probe 2 hosts or more")
    if not 0.1 <= seconds <= 60:
        raise ValueError(f"{seconds} seconds a measurement: choose 0.1 to 60")
    lines: list[str] = []
    launch(
        Cluster(cluster.hosts, 1, cluster.rate, cluster.mtu),
        [sys.executable, "-I", talker.__file__, str(seconds)],
        on_line=lambda rank, line: lines.append(line),
        timeout=60 + 12 * seconds,
    )
    return {str(name): float(value) for name, value in json.loads(lines[-1]).items()}


def table(cluster: Cluster, found: dict[str, float]) -> Table:
    """The findings beside what was asked for."""
    share = (cluster.mtu - _HEADERS) / (cluster.mtu + _ETHERNET)
    shown = Table(
        title=f"{cluster.hosts} hosts, {format_rate(cluster.rate)}, MTU {cluster.mtu}",
        caption="payload received per host, the slowest; asked: the rate less headers",
    )
    for heading in ("traffic", "achieved", "asked", "ratio"):
        shown.add_column(heading, justify="left" if heading == "traffic" else "right")
    for name, value in found.items():
        if name in ("idle", "full"):
            shown.add_row(f"round trip, link {name}", f"{value * 1e3:.2f} ms", "", "")
        elif cluster.rate is None:
            shown.add_row(name, f"{value / 1e6:.1f} Mb/s", "", "")
        else:
            asked = cluster.rate * share
            cells = [f"{bits / 1e6:.1f} Mb/s" for bits in (value, asked)]
            shown.add_row(name, *cells, f"{value / asked:.3f}")
    return shown
