"""Measures the network of a running job, on the job's own transport.

A collective call: every rank makes it while nothing else is on its way, and every rank
gets the same `Network`, or all raise: see [Note: Agreement] in
gradtide.planner.measuring.bench.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from gradtide.core.levels import alike
from gradtide.planner.clock.cost import FREE
from gradtide.planner.measuring.bench import Bench
from gradtide.planner.measuring.device_timing import device as workbench
from gradtide.planner.measuring.device_timing import interference, sharing, turns
from gradtide.planner.measuring.fit import Point, beyond_burst, fit
from gradtide.planner.measuring.request_timing import Kind, kinds, sweep
from gradtide.planner.network import Line, Link, Network, Rate
from gradtide.transport import Transport
from gradtide.transport.hosts import BOOT

HURRIED = 10.0  # seconds for a link below which only what is needed is timed
BUSY_BYTES = (1e5, 4e6)  # of the tensors that keep the queue busy, least and most
SHARES = (0.75, 0.15, 0.1)  # of the budget: links, processor, two threads at once


@dataclass(frozen=True)
class Row:
    """What was found of one way of travelling: the points, and the line through them.

    Rows without a field are for comparison: the fit is of the ring that stands for the
    request.
    """

    field: str
    fit: Rate
    points: tuple[Point, ...]
    dropped: tuple[Point, ...] = ()  # that a shaped link let pass after a pause


def measure(transport: Transport, budget: float, device: torch.device) -> Network:
    """The network among the transport's ranks, in about `budget` seconds.

    `device` is where the gradients are. What links within hosts take is not told apart
    from what those between hosts do. With a small budget or a slow link it takes
    longer: three requests of each kind that is needed are made whatever they take.
    Raises RankError where a rank fails by itself, CommunicationError where one is lost.
    """
    bench = Bench(transport, device)
    size, found = transport.group.size, alike(transport.hosts)
    local = found if isinstance(found, int) else len(found[0])
    local = 1 if local == size else local  # the ranks of a single host: so many hosts
    like = Network(size // local, local, FREE, delay=transport.delay)
    inter, _ = measure_link(bench, like, SHARES[0] * budget)
    return finish(bench, replace(like, inter=inter), budget)


def measure_link(bench: Bench, like: Network, budget: float) -> tuple[Link, list[Row]]:
    """The link that joins the ranks, in about `budget` seconds.

    The ranks are laid out on hosts as `like` says; `like.intra` is None where what
    travels within a host is free.
    """
    everything = bench.prepared(lambda: kinds(bench, like))
    wanted = [kind for kind in everything if kind.needed or budget >= HURRIED]
    points: dict[Kind, list[Point]] = {}
    end = bench.first(bench.now) + budget
    for i, kind in enumerate(wanted):
        left = end - bench.first(bench.now)
        share = kind.weight / sum(other.weight for other in wanted[i:])
        if kind.needed or left > 0:
            points[kind] = sweep(bench, kind, max(left * share, 0.0), like)
    # Two machines may round alike numbers differently.
    rows = bench.first(lambda: _rows(points, like.rate))
    return link(rows, like.distance.far), rows


def _rows(points: Mapping[Kind, Sequence[Point]], rate: float | None) -> list[Row]:
    rows: dict[str, Row] = {}
    for field in dict.fromkeys(kind.field for kind in points if kind.field):
        own = [p for kind in points if kind.field == field for p in points[kind]]
        kept, dropped = beyond_burst(own, rate)
        worked = fit([replace(p, seconds=p.processor) for p in own])
        found = replace(fit(kept), processor=Line(worked.alpha, worked.beta))
        rows[field] = Row(field, found, tuple(kept), tuple(dropped))
    beside = [tuple(points[kind]) for kind in points if not kind.field]
    like = rows.get("ring", rows["direct"])
    return [*rows.values(), *(Row("", like.fit, own) for own in beside)]


def link(rows: Sequence[Row], far: bool = False) -> Link:
    """The rates of the rows; trees that were not timed are made of swaps.

    Among `far` ranks rings start as swaps do: those that are short travel directly, and
    of the time of a long one a start is too little to be told. If they were not timed,
    they carry as direct messages do.
    """
    rates = {row.field: row.fit for row in rows}
    swap = rates["swap"]
    if far:
        ring = rates.get("ring", rates["direct"])
        rates["ring"] = replace(ring, alpha=swap.alpha)
    return Link(**{f.name: rates.get(f.name, swap) for f in fields(Link)})


def finish(bench: Bench, network: Network, budget: float) -> Network:
    """The network, with what its ranks' processors can do measured."""
    seconds = SHARES[2] * budget
    quick = seconds / 8 / max(network.inter.ring.beta, 1e-12)
    nbytes = max(min(quick, BUSY_BYTES[1]), BUSY_BYTES[0])
    processors = bench.first(partial(_shared, bench.everyone(machine)))
    spread, occupancy = turns(bench, processors, network.delay)
    return replace(
        network,
        device=workbench(bench, SHARES[1] * budget),
        interference=interference(bench, nbytes, seconds / 2),
        sharing=sharing(bench, seconds / 2),
        spread=spread,
        # What is not computed on the processor does not keep it busy.
        processors=processors if bench.device.type == "cpu" else None,
        occupancy=occupancy,
    )


def machine() -> tuple[str, int]:
    """What ranks have in common that share processors, and how many those are."""
    name = BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()
    try:
        return name, len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return name, os.cpu_count() or 1


def _shared(machines: Sequence[tuple[str, int]]) -> float:
    """How many processors a rank has for itself, where it has the fewest."""
    ranks = Counter(name for name, _ in machines)
    return min(count / ranks[name] for name, count in machines)
