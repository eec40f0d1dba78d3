"""The record of a profile of selection: what was typed, on what, and what came out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from gradtide.profile.selection.measure import COPY, TOPK, Timing
from gradtide.profile.selection.wire import break_even, dense_seconds


@dataclass(frozen=True)
class Result:
    """A row: medians over `rounds` timed rounds at one size and one density.

    The yardsticks select nothing that is sent: None where that matters.
    """

    name: str
    n: int
    density: float
    rounds: int
    seconds: float
    seconds_p25: float
    seconds_p75: float
    cpu_seconds: float  # of the process: less than `seconds` if others were at work
    realised_density: float | None
    break_even_bits_per_s: float | None


@dataclass(frozen=True)
class DenseTime:
    """Seconds that the dense gradient of `n` elements spends on the wire."""

    n: int
    rate_bits_per_s: float
    seconds: float


@dataclass(frozen=True)
class Record:
    """Everything that `record.json` says."""

    command: str
    commit: str | None
    versions: dict[str, str]
    machine: dict[str, str | int]
    device: str
    threads: int
    ranks: int
    dense: list[DenseTime]
    results: list[Result]

    def dumps(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def rows(
    n: int, density: float, ranks: int, timings: Mapping[str, Timing]
) -> list[Result]:
    """What was measured at one size and density, with the break-even rates."""
    return [_row(name, n, density, ranks, each) for name, each in timings.items()]


def dense_times(
    sizes: Sequence[int], rates: Sequence[float], ranks: int
) -> list[DenseTime]:
    """The dense exchange of every size at every rate."""
    return [
        DenseTime(n, rate, dense_seconds(n, ranks, rate))
        for n in sizes
        for rate in rates
    ]


def _row(name: str, n: int, density: float, ranks: int, timing: Timing) -> Result:
    low, middle, high = map(float, np.percentile(timing.seconds, [25, 50, 75]))
    selects = name not in (TOPK, COPY)
    return Result(
        name=name,
        n=n,
        density=density,
        rounds=len(timing.seconds),
        seconds=middle,
        seconds_p25=low,
        seconds_p75=high,
        cpu_seconds=median(timing.cpu_seconds),
        realised_density=timing.count / n if selects else None,
        break_even_bits_per_s=(
            break_even(n, timing.count, ranks, middle) if selects else None
        ),
    )
