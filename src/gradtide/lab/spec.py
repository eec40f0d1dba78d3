"""What one comparison is asked to do, and what can be found wrong with it at once.

Knows names and numbers; knows nothing of processes. The parent writes a spec as JSON,
the worker on every rank reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gradtide.auto import undecided
from gradtide.lab import workloads
from gradtide.lab.contestants import BASELINES, check_scheme
from gradtide.lab.workloads.shapes import units
from gradtide.lab.workloads.timing import by_work, from_trace
from gradtide.scheme import parse

SETTLE = 3  # steps after a change of schemes: buckets and thresholds are new


@dataclass(frozen=True)
class Spec:
    """One comparison. `rate` is in bits per second, None where nothing is shaped."""

    schemes: tuple[str, ...]
    workload: str
    hosts: int
    ranks_per_host: int
    rate: float | None
    steps: int  # timed steps of every contestant
    warmup: int = 3  # untimed steps before the first round
    rounds: int = 3  # blocks into which the timed steps of a contestant are cut
    step_ms: float | None = None
    trace: str | None = None
    seed: int = 0

    @property
    def size(self) -> int:
        return self.hosts * self.ranks_per_host

    def blocks(self) -> list[int]:
        """Timed steps of each round, as even as can be."""
        each, more = divmod(self.steps, self.rounds)
        return [each + (index < more) for index in range(self.rounds)]

    def dumps(self) -> str:
        return json.dumps(asdict(self))


def loads(text: str) -> Spec:
    """The spec that `Spec.dumps` wrote."""
    fields = json.loads(text)
    return Spec(**{**fields, "schemes": tuple(fields["schemes"])})


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


def check(spec: Spec) -> None:
    """`ValueError` for everything that can be known to fail before anything starts."""
    twice = [n for i, n in enumerate(spec.schemes) if n in spec.schemes[:i]]
    if twice:
        raise ValueError(f"--schemes names {twice[0]} twice: once is enough")
    for name in spec.schemes:
        check_scheme(name)
        _check_decided(name, spec.warmup)
    if spec.warmup < 1:
        raise ValueError(
            f"--warmup {spec.warmup}: give 1 or more, DDP settles its buckets there"
        )
    if spec.rounds < 1:
        raise ValueError(f"--rounds {spec.rounds}: give 1 or more")
    if spec.steps < spec.rounds:
        raise ValueError(
            f"--steps {spec.steps} in --rounds {spec.rounds}: time at least one step a "
            "round"
        )
    if spec.size < 2:
        raise ValueError("one rank has nobody to average with: use 2 or more")
    _check_workload(spec)


def _check_decided(name: str, warmup: int) -> None:
    """`auto` must have decided, and its scheme have settled, when time is taken."""
    auto = None if name in BASELINES else undecided(parse(name))
    if auto is not None and warmup < auto.steps + SETTLE:
        raise ValueError(
            f"--warmup {warmup}: {name} decides after {auto.steps} steps, so give "
            f"{auto.steps + SETTLE} or more"
        )


def _check_workload(spec: Spec) -> None:
    """Build what is small; of a replay, whose tensors are large, only the timings."""
    names = [name for name, _ in workloads.WORKLOADS]
    trace = None if spec.trace is None else Path(spec.trace)
    if spec.workload not in names or not spec.workload.startswith("replay:"):
        workloads.build(
            spec.workload,
            rank=0,
            size=spec.size,
            seed=spec.seed,
            step_ms=spec.step_ms,
            trace=trace,
        )
        return
    if trace is not None and spec.step_ms is not None:
        raise ValueError("--step-ms and --trace both say how long a step is: give one")
    parts = units(spec.workload.removeprefix("replay:"))
    if trace is not None:
        from_trace(parts, trace)
    if spec.step_ms is not None:
        by_work(parts, spec.step_ms)
