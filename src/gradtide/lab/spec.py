"""What a comparison or a race is asked to do, and what is found wrong with it at once.

Knows names and numbers; knows nothing of processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradtide.core.fields import refuse
from gradtide.lab import workloads
from gradtide.lab.cluster import Cluster
from gradtide.lab.contestants import named
from gradtide.lab.devices import check_device, own_device
from gradtide.lab.internet import Internet
from gradtide.lab.race.standings import Point
from gradtide.lab.rate import format_rate
from gradtide.lab.workloads.own import is_own
from gradtide.scheme import Scheme, undecided

SETTLE = 3  # steps after a change of schemes: buckets and thresholds are new


@dataclass(frozen=True)
class Place:
    """Who is trained on what, and where: what comparisons and races have in common.

    `rate` is in bits per second, None where nothing is shaped.
    """

    schemes: tuple[str, ...]
    workload: str
    hosts: int
    ranks_per_host: int
    rate: float | None
    seed: int = field(default=0, kw_only=True)
    # Of what a host's ranks send each other.
    local_rate: float | None = field(default=None, kw_only=True)
    # What lies between hosts; None: a switch.
    internet: Internet | None = field(default=None, kw_only=True)
    # How long a step of a replay is.
    step_ms: float | None = field(default=None, kw_only=True)
    trace: Path | None = field(default=None, kw_only=True)
    device: str = field(default="cpu", kw_only=True)

    @property
    def size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def cluster(self) -> Cluster:
        """The one that it is held on, where it is emulated."""
        place = self.hosts, self.ranks_per_host, self.rate
        near, far = self.local_rate, self.internet
        return Cluster.emulating(*place, local_rate=near, internet=far)

    @property
    def links(self) -> str:
        """In words."""
        if self.internet is not None:
            return self.internet.words()
        return (
            f"links of {format_rate(self.rate)}/s" if self.rate else "links not shaped"
        )

    def told(self) -> dict[str, Any]:
        """What every record says of it first."""
        found = {
            "workload": self.workload,
            "hosts": self.hosts,
            "ranks_per_host": self.ranks_per_host,
            "rate_bits_per_s": self.rate,
        }
        if self.local_rate is not None:
            found["local_rate_bits_per_s"] = self.local_rate
        if self.internet is not None:
            found["internet"] = self.internet.told()
        if self.device != "cpu":
            found["device"] = self.device
        return found

    def build(self, rank: int) -> workloads.Workload:
        """A fresh copy of what is trained, as this rank sees it."""
        how = self.seed, self.step_ms, self.trace
        device = own_device(self.device)  # also for what a user's function makes
        built = workloads.build(self.workload, rank, self.size, *how)
        if not is_own(self.workload):
            built.model.to(device)
        return built


@dataclass(frozen=True)
class Spec(Place):
    """One comparison."""

    steps: int  # timed steps of every contestant
    warmup: int = 3  # untimed steps before the first round
    rounds: int = 3  # blocks into which the timed steps of a contestant are cut

    def blocks(self) -> list[int]:
        """Timed steps of each round, as even as can be."""
        each, more = divmod(self.steps, self.rounds)
        return [each + (index < more) for index in range(self.rounds)]


@dataclass(frozen=True)
class RaceSpec(Place):
    """One race. `target` names who of `schemes` the others are held against.

    Who has trained before is in `courses`, and does not train again; `earlier` says by
    which commands, on what.
    """

    seconds: float  # of training that each contestant has
    every: int = 20  # steps between two looks at the held-out loss
    target: str = field(default="", kw_only=True)  # empty: the first
    courses: dict[str, list[Point]] = field(default_factory=dict, kw_only=True)
    earlier: list[dict[str, Any]] = field(default_factory=list, kw_only=True)

    @property
    def leader(self) -> str:
        """The contestant whose lowest loss all race to."""
        return self.target or self.schemes[0]

    @property
    def quantity(self) -> str:
        """What is looked at: a user's own program may have no held-out data."""
        return "loss" if is_own(self.workload) else "held-out loss"

    @property
    def missing(self) -> tuple[str, ...]:
        """Who is still to train."""
        return tuple(name for name in self.schemes if name not in self.courses)

    def told(self) -> dict[str, Any]:
        own = {"seconds": self.seconds, "every": self.every, "seed": self.seed}
        return super().told() | own


def split_schemes(text: str) -> tuple[str, ...]:
    """Split at the commas that no bracket encloses: `ddp,Scheme(Dense(), A)` is two."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    names = tuple(part.strip() for part in parts)
    if not all(names):
        raise ValueError(f"--schemes {text!r} names an empty scheme: remove a comma")
    return names


def check_place(spec: Place) -> dict[str, Scheme | None]:
    """The schemes, None for baselines; `ValueError` for what cannot take part."""
    names = spec.schemes
    twice = [n for i, n in enumerate(names) if n in names[:i]]
    if twice:
        raise ValueError(f"--schemes names {twice[0]} twice: once is enough")
    wrong = {
        f"--seed {spec.seed}: give 0 to {2**32 - 1}": not 0 <= spec.seed < 2**32,
        "one rank has nobody to average with: use 2 or more": spec.size < 2,
    }
    refuse(wrong)
    check_device(spec.device)
    if spec.device != "cpu" and spec.workload in workloads.REPLAYED:
        raise ValueError(
            f"--device {spec.device}: {spec.workload} waits in place of computing, and "
            "its gradients are on the CPU; choose a workload that really computes"
        )
    return {name: named(name) for name in names}


def check(spec: Spec) -> None:
    """`ValueError` for everything that can be known to fail before anything starts."""
    for name, scheme in check_place(spec).items():
        auto = None if scheme is None else undecided(scheme)
        # It must have decided, and its scheme have settled, when time is taken.
        if auto is not None and spec.warmup < auto.steps + SETTLE:
            raise ValueError(
                f"--warmup {spec.warmup}: {name} decides after {auto.steps} steps, so "
                f"give {auto.steps + SETTLE} or more"
            )
    warmup, steps, rounds = spec.warmup, spec.steps, spec.rounds
    wrong = {
        f"--warmup {warmup}: give 1 or more, DDP settles its buckets there": warmup < 1,
        f"--rounds {rounds}: give 1 or more": rounds < 1,
        f"--steps {steps} in --rounds {rounds}: time at least one step a round": (
            steps < rounds
        ),
    }
    refuse(wrong)
    workloads.check(spec.workload, spec.size, spec.step_ms, spec.trace)


def check_race(spec: RaceSpec) -> None:
    """`ValueError` for everything that can be known to fail before anything starts."""
    check_place(spec)
    seconds, known = spec.seconds, spec.leader in spec.schemes
    wrong = {
        f"--target {spec.target}: name one of --schemes": not known,
        f"--seconds {seconds}: a number above 0": not 0 < seconds < math.inf,
        f"--every {spec.every}: give 1 or more steps": spec.every < 1,
        f"--workload {spec.workload}: a replay learns nothing, so no loss can be raced "
        "to; use one that really computes, such as gpt-small": (
            spec.workload in workloads.REPLAYED
        ),
    }
    refuse(wrong)
    workloads.check(spec.workload, spec.size, spec.step_ms, spec.trace)
