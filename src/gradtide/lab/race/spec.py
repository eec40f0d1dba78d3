"""What one race is asked to do, and what can be found wrong with it at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradtide.lab import workloads
from gradtide.lab.spec import check_schemes


@dataclass(frozen=True)
class RaceSpec:
    """One race. `rate` is in bits per second, None where nothing is shaped.

    The first of `schemes` is the one that the others are held against.
    """

    schemes: tuple[str, ...]
    workload: str
    hosts: int
    ranks_per_host: int
    rate: float | None
    seconds: float  # of training that each contestant has
    every: int = 20  # steps between two looks at the held-out loss
    seed: int = 0
    local_rate: float | None = None  # of what a host's ranks send each other

    @property
    def size(self) -> int:
        return self.hosts * self.ranks_per_host

    def build(self, rank: int) -> workloads.Workload:
        """A fresh copy of what is trained, as this rank sees it."""
        return workloads.build(self.workload, rank=rank, size=self.size, seed=self.seed)


def check(spec: RaceSpec) -> None:
    """`ValueError` for everything that can be known to fail before anything starts."""
    check_schemes(spec.schemes)
    if not 0 < spec.seconds < math.inf:
        raise ValueError(f"--seconds {spec.seconds}: a number above 0")
    if spec.every < 1:
        raise ValueError(f"--every {spec.every}: give 1 or more steps")
    if spec.seed < 0:
        raise ValueError(f"--seed {spec.seed}: give 0 or more")
    if spec.size < 2:
        raise ValueError("one rank has nobody to average with: use 2 or more")
    if spec.workload in workloads.REPLAYED:
        raise ValueError(
            f"--workload {spec.workload}: a replay learns nothing, so no loss can be "
            "raced to; use one that really computes, such as gpt-small"
        )
    spec.build(rank=0)
