"""Schemes x ranks x rates: one prediction each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradtide.lab.rate import format_rate, limited
from gradtide.lab.workloads.replay import timings
from gradtide.lab.workloads.shapes import ARCHITECTURES, units
from gradtide.planner import network as networks
from gradtide.planner import trace as traces
from gradtide.planner.network import MOST, Network
from gradtide.planner.search import equipped as equipped
from gradtide.planner.steps.training import with_optimizer
from gradtide.planner.trace import Factors, StepTrace, Unit
from gradtide.planner.virtual import Prediction, simulate
from gradtide.scheme import Scheme

DEVICE = "v100"  # of the years of which replays have their milliseconds
EQUAL = 1 + 1e-6  # steps that differ by less are equal


@dataclass(frozen=True)
class Cell:
    """One scheme among so many ranks, with hosts' links of one rate (bits/s)."""

    scheme: str
    ranks: int
    rate: float | None
    prediction: Prediction
    efficiency: float  # of one rank alone: its step, divided by this one


@dataclass(frozen=True)
class Grid:
    """All cells, and what they were made of."""

    trace: StepTrace
    network: Network
    ranks: Sequence[int]
    rates: Sequence[float | None]
    schemes: Mapping[str, Scheme]
    cells: Sequence[Cell]

    def at(self, ranks: int, rate: float | None) -> list[Cell]:
        """The cells of one cluster, in the order of the schemes."""
        return [c for c in self.cells if (c.ranks, c.rate) == (ranks, rate)]

    def fastest(self, ranks: int, rate: float | None) -> Cell:
        """Of equals, the scheme that was named first."""
        cells = self.at(ranks, rate)
        best = min(cell.prediction.step for cell in cells)
        return next(c for c in cells if c.prediction.step <= EQUAL * best)


def run(
    trace: StepTrace,
    network: Network,
    schemes: Mapping[str, Scheme],
    ranks: Sequence[int],
    rates: Sequence[float] = (),
    delay: float = 0.0,
) -> Grid:
    """Simulate every scheme on every cluster; round trips take `delay` seconds more.

    Without `rates` hosts' links stay as they are. Raises ValueError for numbers of
    ranks that do not fill hosts, and for schemes that cannot be simulated.
    """
    for size in ranks:
        if not 2 <= size <= MOST or size % network.ranks_per_host:
            raise ValueError(
                f"{size} ranks: give 2 to {MOST}, in multiples of the "
                f"{network.ranks_per_host} ranks of a host"
            )
    trace = with_optimizer(trace, network.device)
    asked: Sequence[float | None] = rates or [network.rate]
    cells = []
    for size in ranks:
        hosts = size // network.ranks_per_host
        for rate in asked:
            there = network.scaled(hosts=hosts, rate=rate if rates else None)
            there = there.delayed(delay)
            for name, scheme in schemes.items():
                found = simulate(trace, scheme, there)
                alone = trace.compute / found.step
                cells.append(Cell(name, size, rate, found, alone))
    return Grid(trace, network, ranks, asked, schemes, cells)


def read_trace(
    text: str, step_ms: float | None = None, device: str | None = None
) -> StepTrace:
    """The trace in a file, or that of a replay workload such as replay:resnet50.

    `device` is whose milliseconds `step_ms` are.
    """
    if not text.startswith("replay:"):
        if step_ms is not None:
            raise ValueError(f"{text} says how long a step takes: leave out --step-ms")
        return traces.load(Path(text))
    name = text.removeprefix("replay:")
    if name not in ARCHITECTURES:
        known = ", ".join(f"replay:{a}" for a in ARCHITECTURES)
        raise ValueError(f"no workload {text!r}: choose one of {known}, or a file")
    found = replayed(name, step_ms)
    if step_ms is None or device is None:
        return found
    return replace(found, device=device)


def replayed(architecture: str, step_ms: float | None) -> StepTrace:
    """A replay workload's step: forward and backward by the work of its units.

    The optimizer takes no time here: what it takes depends on the device alone. Factors
    of K-FAC take what half of their products does, of those of the forward: A and G
    are symmetric.
    """
    workload = f"replay:{architecture}"
    times = timings(workload, step_ms, trace=None)
    groups: list[list[Unit]] = []  # the tensors of every layer, in forward order
    layers = []
    for part, timing in zip(units(architecture), times, strict=True):
        if part.shapes:
            tensors = ((f"{part.name}.{name}", shape) for name, shape in part.shapes)
            groups.append(
                [Unit(n, math.prod(s), 4, 0.0, 0.0, 0.0, s) for n, s in tensors]
            )
        # Work without a tensor, as of a tied head, belongs to the layer before.
        group = groups[-1]
        # Read at once, and ready at once: [Note: Whose time] of planner.trace.
        group[-1] = replace(group[-1], forward=group[-1].forward + timing.forward)
        group[0] = replace(group[0], backward=group[0].backward + timing.backward)
        if part.positions:
            # Seconds of an operation at all positions.
            seconds = timing.forward * part.positions / part.work
            weight, *biases = group
            g, a = weight.shape[0], math.prod(weight.shape[1:]) + len(biases)
            bias = biases[0].name if biases else None
            layers.append(Factors(weight.name, bias, seconds * a**2, seconds * g**2))
    ready = [unit for group in reversed(groups) for unit in group]
    place = {unit.name: i for i, unit in enumerate(ready)}
    return StepTrace(
        name=workload,
        units=tuple(ready),
        optimizer=0.0,
        forward_order=tuple(place[unit.name] for group in groups for unit in group),
        layers=tuple(layers),
        device=DEVICE,
    )


def read_network(text: str, ranks_per_host: int = 1) -> Network:
    """The network in a profile, or an ideal one of a rate such as 10gbit."""
    if Path(text).suffix == ".json" or os.path.exists(text):
        return networks.load(Path(text))
    none = "a network without a limit has nothing to simulate: say 10gbit"
    return Network.ideal(2, ranks_per_host, limited(text, none))


def rate_name(rate: float | None) -> str:
    return "as measured" if rate is None else format_rate(rate)
