"""What `gradtide plan` and `gradtide advise` do with a trace.

Knows the planner, and options as they were typed; nothing of how traces are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from gradtide.lab import options
from gradtide.lab.amounts import parse_share
from gradtide.lab.checks import check_file
from gradtide.lab.options import Far
from gradtide.lab.spec import split_schemes
from gradtide.planner import pilot as pilots
from gradtide.planner import report, search
from gradtide.planner.advice import STEPS, Advice, advise
from gradtide.planner.data.presets import preset
from gradtide.planner.network import Network, imagine, load
from gradtide.planner.prior import Cost
from gradtide.planner.trace import StepTrace
from gradtide.scheme import Scheme, parse
from gradtide.simulate.grid import read_trace as read_trace


class Place(NamedTuple):
    """Where is trained, as it was typed: None of what was not said."""

    ranks: int | None = None
    ranks_per_host: int | None = None
    rate: str | None = None
    far: Far = Far()
    stragglers: str | None = None
    hosts: int | None = None

    def size(self, measured: Network | None) -> int | None:
        """The number of all ranks, by either option; ValueError for both."""
        if self.hosts is None:
            return self.ranks
        if self.ranks is not None:
            raise ValueError(
                f"--hosts {self.hosts} and --ranks {self.ranks}: leave out one of them"
            )
        if self.hosts < 1:
            raise ValueError(f"--hosts {self.hosts}: 1 or more")
        usual = 1 if measured is None else measured.ranks_per_host
        return self.hosts * (self.ranks_per_host or usual)


class Weighed(NamedTuple):
    """How steps are weighed: a margin, the steps of a run, and a race's record."""

    margin: float | None = None
    steps: int | None = None  # as many as a run is taken to have
    pilot: Path | None = None


KNOWN = Weighed()  # by what is known of other tasks


class Plan(NamedTuple):
    """What was made of a trace."""

    advice: Advice
    step: StepTrace
    network: Network

    def show(self) -> None:
        """Print it; a line to paste stays one line."""
        Console().print(report.show(*self), highlight=False, crop=False)


@dataclass(frozen=True)
class Planning:
    """How traces are planned for, from options that are checked."""

    network: Network
    device: str | None
    schemes: Mapping[str, Scheme] | None
    margin: float | None = None
    steps: int = STEPS
    known: Mapping[str, Cost] | None = None
    json: Path | None = None

    @classmethod
    def asked(
        cls,
        network: Path | None,
        place: Place,
        device: str | None = None,
        schemes: str | None = None,
        weighed: Weighed = KNOWN,
        json: Path | None = None,
    ) -> Planning:
        """From what was typed. Raises ValueError."""
        margin, steps, pilot = weighed
        steps = STEPS if steps is None else steps
        if margin is not None and not 0 <= margin < math.inf:
            raise ValueError(f"--margin {margin}: a share of more steps, 0 or more")
        if steps < 1:
            raise ValueError(f"--steps {steps}: 1 or more")
        if json is not None:
            check_file("--json", json)
        if device is not None:
            preset(device)
        measured = None if network is None else load(network)
        per_host = place.ranks_per_host
        own = place.size(measured), per_host or 1, place.rate
        ranks, bits, *between = options.planned(*own, place.far)
        there = imagine(measured, ranks, per_host, bits, *between)
        if place.stragglers is not None:
            share = parse_share("--stragglers", place.stragglers)
            there = replace(there, stragglers=share)
        names = None if schemes is None else split_schemes(schemes)
        wanted = None if names is None else {name: parse(name) for name in names}
        known = None if pilot is None else pilots.read(pilot)
        return cls(there, device, wanted, margin, steps, known, json)

    def of(self, step: StepTrace) -> Plan:
        """Write it, too, if that was asked for; ValueError for what has no plan."""
        there = search.equipped(self.network, self.device, step)
        found = self.advise(step, there, self.schemes)
        if self.json is not None:
            text = report.dumps(found, step, there)
            self.json.write_text(text, encoding="utf-8")
        return Plan(found, step, there)

    def advise(
        self,
        step: StepTrace,
        there: Network,
        schemes: Mapping[str, Scheme] | None,
        tune: bool = True,
    ) -> Advice:
        """What to train with on a network, by what else was asked for."""
        ranked = search.rank(step, there, schemes, tune=tune)
        weighed = self.margin, step.steps, self.steps, self.known
        return advise(ranked, there.size, *weighed)
