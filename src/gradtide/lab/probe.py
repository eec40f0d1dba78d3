"""What an emulated cluster really delivers: bandwidth, round trips and loss."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from gradtide.lab import surveyor, talker
from gradtide.lab.amounts import format_share, format_time
from gradtide.lab.cluster import Cluster
from gradtide.lab.internet import Internet
from gradtide.lab.launch import launch
from gradtide.lab.rate import format_rate

# A full packet's share that is not headers (TCP/IP with timestamps, and Ethernet, which
# tbf counts too).
_HEADERS, _ETHERNET = 52, 14


def probe(cluster: Cluster, seconds: float = 1.0) -> dict[str, float]:
    """Bits/s by pattern of traffic, and under "idle" and "full" seconds a round trip.

    By connections that have just begun. One rank a host whatever the cluster says;
    takes about six times `seconds`.
    """
    found = _run(cluster, seconds, 12 * seconds, talker.__file__)
    return {str(name): float(value) for name, value in found.items()}


@dataclass(frozen=True)
class Way:
    """From one host to another: seconds of the round trip, bits/s, share of packets."""

    sender: int
    receiver: int
    round_trip: float
    rate: float
    loss: float


def survey(cluster: Cluster, seconds: float = 1.0) -> list[Way]:
    """What each pair of hosts that are far from each other has, as it was measured.

    By datagrams. Takes about six times `seconds` for every host but one.
    """
    net = cluster.internet
    assert net is not None
    rates = json.dumps([[link.rate, link.sends] for link in net.links])
    longest = cluster.hosts * (10 * seconds + 30)
    found = _run(cluster, seconds, longest, surveyor.__file__, rates)
    return [
        Way(*pair, *(found[name][pair[0]][pair[1]] for name in MEASURED))
        for pair in net.paths()
    ]


MEASURED = ("round trips", "rates", "losses")


def asked(internet: Internet, sender: int, receiver: int) -> Way:
    """What there should be between two hosts."""
    path = internet.path(sender, receiver)
    rate = min(internet.links[sender].sends, internet.links[receiver].rate)
    return Way(sender, receiver, path.delay, rate, path.loss)


def _run(cluster: Cluster, seconds: float, longest: float, *words: str) -> Any:
    """What rank 0 of a program has printed last; a rank on each host."""
    if cluster.hosts < 2:
        raise ValueError("a single host has nobody to talk to: probe 2 hosts or more")
    if not 0.1 <= seconds <= 60:
        raise ValueError(f"{seconds} seconds a measurement: choose 0.1 to 60")
    lines: list[str] = []
    program, *more = words
    launch(
        replace(cluster, ranks_per_host=1),
        [sys.executable, "-I", program, str(seconds), *more],
        on_line=lambda rank, line: lines.append(line),
        timeout=60 + longest,
    )
    return json.loads(lines[-1])


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


def pairs(cluster: Cluster, ways: Sequence[Way]) -> Table:
    """What was measured of each pair, beside what was asked for."""
    net = cluster.internet
    assert net is not None
    shown = Table(
        title=f"{cluster.hosts} hosts, {net.words()}, MTU {cluster.mtu}",
        caption="measured / asked; rates with headers, all hosts sending at once",
    )
    for heading in ("from", "to", "round trip", "rate", "lost"):
        shown.add_column(heading, justify="right")
    for way in ways:
        wanted = asked(net, way.sender, way.receiver)
        shown.add_row(
            str(way.sender),
            str(way.receiver),
            f"{way.round_trip * 1e3:.1f} / {format_time(wanted.round_trip)}",
            f"{way.rate / 1e6:.4g} / {format_rate(wanted.rate)}",
            f"{way.loss * 100:.2g} / {format_share(wanted.loss)}",
        )
    return shown
