"""What one comparison is asked to do, and what can be found wrong with it at once.

Knows names and numbers; knows nothing of processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradtide.lab import workloads
from gradtide.lab.contestants import named
from gradtide.lab.workloads.replay import timings
from gradtide.scheme import Scheme, undecided

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
    trace: Path | None = None
    seed: int = 0
    local_rate: float | None = None  # of what a host's ranks send each other

    @property
    def size(self) -> int:
        return self.hosts * self.ranks_per_host

    def blocks(self) -> list[int]:
        """Timed steps of each round, as even as can be."""
        each, more = divmod(self.steps, self.rounds)
        return [each + (index < more) for index in range(self.rounds)]

    def build(self, rank: int) -> workloads.Workload:
        """A fresh copy of what is trained, as this rank sees it."""
        return workloads.build(
            self.workload,
            rank=rank,
            size=self.size,
            seed=self.seed,
            step_ms=self.step_ms,
            trace=self.trace,
        )


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


def check_schemes(names: tuple[str, ...]) -> dict[str, Scheme | None]:
    """The schemes, None for baselines; `ValueError` for what cannot take part."""
    twice = [n for i, n in enumerate(names) if n in names[:i]]
    if twice:
        raise ValueError(f"--schemes names {twice[0]} twice: once is enough")
    return {name: named(name) for name in names}


def check(spec: Spec) -> None:
    """`ValueError` for everything that can be known to fail before anything starts."""
    for name, scheme in check_schemes(spec.schemes).items():
        auto = None if scheme is None else undecided(scheme)
        # It must have decided, and its scheme have settled, when time is taken.
        if auto is not None and spec.warmup < auto.steps + SETTLE:
            raise ValueError(
                f"--warmup {spec.warmup}: {name} decides after {auto.steps} steps, so "
                f"give {auto.steps + SETTLE} or more"
            )
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
    if spec.seed < 0:
        raise ValueError(f"--seed {spec.seed}: give 0 or more")
    if spec.size < 2:
        raise ValueError("one rank has nobody to average with: use 2 or more")
    # What is small is built; of a replay, whose tensors are large, only the timings.
    if spec.workload not in workloads.REPLAYED:
        spec.build(rank=0)
        return
    if spec.trace is not None and spec.step_ms is not None:
        raise ValueError("--step-ms and --trace both say how long a step is: give one")
    timings(spec.workload, spec.step_ms, spec.trace)
