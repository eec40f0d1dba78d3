"""What was found, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median

from rich.console import Group, RenderableType
from rich.text import Text

from gradtide.doctor.facts import ranks_of
from gradtide.doctor.run import Found, between
from gradtide.lab import tables
from gradtide.planner.data import document
from gradtide.planner.network import Network

FORMAT = "gradtide doctor"
MOST = 16  # rows of a table
LINK = "one TCP stream, all hosts at once; a fabric that only NCCL uses is not measured"


def show(found: Found) -> Group:
    """The report; ends with the verdict."""
    lines: list[RenderableType] = [Text(_head(found)), _hosts(found)]
    if found.round_trips:
        lines.append(_links(found))
    lines += [Text(line) for line in _rest(found)]
    for finding in found.findings:
        style = "bold red" if finding.level == "failure" else "yellow"
        lines.append(Text(f"{finding.level}: {finding.words}", style=style))
    if found.advice:
        lines.append(Text(f"advice: {found.advice}"))
    return Group(*lines, Text(verdict(found), style="bold"))


def verdict(found: Found) -> str:
    """The last line."""
    failures = sum(finding.level == "failure" for finding in found.findings)
    warnings = len(found.findings) - failures
    noted = f", {warnings} warning{'s' if warnings != 1 else ''}" if warnings else ""
    if failures:
        several = "s" if failures > 1 else ""
        return f"Training would fail here: {failures} failure{several}{noted}."
    if found.place is None:
        return f"Nothing is wrong with this process alone{noted}."
    return f"Training can start: {found.place.size} ranks{noted}."


def _head(found: Found) -> str:
    if found.place is None:
        return "one process, started by no launcher"
    place = found.place
    return (
        f"{place.size} rank{'s' if place.size > 1 else ''} on {len(found.hosts)} "
        f"host{'s' if len(found.hosts) != 1 else ''}, as {place.launcher} says; they "
        f"meet at {place.address}:{place.port}"
    )


def _hosts(found: Found) -> RenderableType:
    names = map(tables.name, ("Gloo's address", "interface"))
    numbers = map(tables.number, ("cores", "threads", "GPUs"))
    grid = tables.grid("host", "ranks", *names, "why", *numbers, padding=(0, 1, 0, 0))
    by_rank = {each.rank: each for each in found.everybody}
    for host in found.hosts[:MOST]:
        own = [by_rank[rank] for rank in host.ranks]
        threads = sum(each.threads for each in own)
        ranks = ranks_of(host.ranks).partition(" ")[2]
        head, gpus = own[0], max(each.gpus for each in own)
        words = head.address or "none", head.interface, head.why
        cells = map(str, (head.cores, threads, gpus))
        grid.add_row(f"{host.number} {host.name}", ranks, *words, *cells)
    return grid


def _links(found: Found) -> RenderableType:
    grid = tables.grid(
        tables.name("link"), *map(tables.number, ("round trip ms", "Mbit/s", "clock s"))
    )
    trips, rates = between(found.round_trips), between(found.rates)
    pairs = sorted(trips, key=lambda pair: -trips[pair])
    slowest = sorted(rates, key=lambda pair: rates[pair])
    shown = dict.fromkeys([*slowest[: MOST // 2], *pairs])
    inside = sorted(found.round_trips.keys() - trips.keys())
    for one, other in [*sorted(list(shown)[:MOST]), *inside[:MOST]]:
        trip, rate = found.round_trips.get((one, other)), found.rates.get((one, other))
        known = other == 0 and one in found.clocks
        name = f"host {one} to host {other}" if one != other else f"within host {one}"
        cells = f"{1e3 * trip:.3g}" if trip is not None else "", _megabits(rate)
        grid.add_row(name, *cells, f"{found.clocks[one]:+.3f}" if known else "")
    grid.caption = LINK
    return grid


def _rest(found: Found) -> list[str]:
    """What fits into lines."""
    lines = [
        f"{', '.join(f'{name} {v}' for name, v in own.versions.items())}; "
        f"backend {own.backend}, as init_process_group() would choose it "
        f"({f'{own.gpus} GPUs' if own.gpus else 'no GPU is seen'}); "
        f"OMP_NUM_THREADS {own.omp or 'not set'}; {own.files or 'any number of'} files"
        for own in found.everybody[:1]
    ]
    if rates := between(found.rates).values():
        lines.append(
            f"between hosts: {_megabits(min(rates))} Mbit/s on the slowest of "
            f"{len(rates)} links, {_megabits(median(rates))} on the typical one"
        )
    if found.tried is not None and not found.tried.error:
        levels = _levels(found.tried.levels, len(found.hosts))
        lines.append(f"Gloo works: an all-reduce among all ranks{levels}")
        if found.tried.network is not None:
            lines.append(_network(found.tried.network))
    elif found.failed and found.place is not None and found.tried is None:
        lines.append("Gloo was not tried, nor the network measured")
    return lines


def _levels(levels: int, num_hosts: int) -> str:
    if levels > 1 and num_hosts > 1:
        return f"; the {levels} ranks of a host average among themselves first"
    return "" if num_hosts == 1 else "; all average with all, without levels"


def _network(network: Network) -> str:
    ring = network.inter.ring
    rate = f"{8e-6 / ring.beta:.4g} Mbit/s" if ring.beta else "no limit"
    where = "between hosts" if network.hosts > 1 else "on this host"
    return f"over Gloo {where}: {rate}, {1e3 * ring.alpha:.3g} ms to start a message"


def _megabits(value: float | None) -> str:
    return f"{value / 1e6:.4g}" if value else ""


def dumps(found: Found) -> str:
    """The report as JSON: seconds, bits/s; hosts by their numbers."""
    content = {
        "verdict": verdict(found),
        "failed": found.failed,
        "launcher": found.place and found.place.launcher,
        "findings": [asdict(finding) for finding in found.findings],
        "hosts": [asdict(host) for host in found.hosts],
        "ranks": [asdict(each) for each in found.everybody],
        "links": [
            {
                "from": sender,
                "to": receiver,
                "round_trip": trip,
                "rate": found.rates.get((sender, receiver)),
            }
            for (sender, receiver), trip in sorted(between(found.round_trips).items())
        ],
        "within_hosts": [
            {"host": pair[0], "round_trip": trip, "rate": found.rates.get(pair) or None}
            for pair, trip in sorted(found.round_trips.items())
            if pair[0] == pair[1]
        ],
        "clocks": {str(number): off for number, off in sorted(found.clocks.items())},
        "gloo": found.tried
        and {
            "error": found.tried.error or None,
            "levels": found.tried.levels,
            "network": found.tried.network and asdict(found.tried.network),
        },
        "advice": found.advice or None,
        "predicted_steps": found.predicted_steps,
    }
    return document.dumps(FORMAT, content)
