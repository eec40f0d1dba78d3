"""A profile of selection from what was asked to the record.

Bytes on the wire are those that a rank sends; rates are in bits/s, of each rank's link
each way. Latency is not counted there, and neither is anything that overlaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch

from gradtide.collectives._entries import length
from gradtide.core.fields import refuse
from gradtide.lab.devices import check_device
from gradtide.lab.record import origin
from gradtide.profile.device import check_threads, threads
from gradtide.profile.selection.measure import (
    COPY,
    TOPK,
    Gradients,
    Timing,
    measure,
)
from gradtide.selectors import SELECTORS
from gradtide.wire import codec_of


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

    origin: dict[str, Any]
    device: str
    threads: int
    ranks: int
    dense: list[DenseTime]
    results: list[Result]

    def dumps(self) -> str:
        fields = asdict(self)
        return json.dumps({**fields.pop("origin"), **fields}, indent=2) + "\n"


def dense_bytes(n: int, ranks: int) -> float:
    """Of a ring all-reduce of `n` float32 elements."""
    return 2 * (ranks - 1) / ranks * 4 * n


def sparse_bytes(n: int, count: float, ranks: int) -> float:
    """Of an all-gather of about `count` entries of `n` from each rank.

    The plainest of the sparse exchanges, and with many ranks the longest.
    """
    return (ranks - 1) * length(round(count), n, codec_of(None, torch.float32))


def break_even(n: int, count: float, ranks: int, seconds: float) -> float:
    """The rate below which `seconds` of selection and the sparse exchange are faster.

    Zero if the sparse exchange is the longer one at any rate. All of `seconds` counts
    against selection, although a dense exchange needs its gradients copied, too.
    """
    saved = dense_bytes(n, ranks) - sparse_bytes(n, count, ranks)
    return max(0.0, 8 * saved / seconds)


def dense_times(
    sizes: Sequence[int], rates: Sequence[float], ranks: int
) -> list[DenseTime]:
    """The dense exchange of every size at every rate."""
    pairs = product(sizes, rates)
    return [DenseTime(n, rate, 8 * dense_bytes(n, ranks) / rate) for n, rate in pairs]


def row(name: str, n: int, density: float, ranks: int, timing: Timing) -> Result:
    """What was measured at one size and density, with the break-even rate."""
    low, middle, high = map(float, np.percentile(timing.seconds, [25, 50, 75]))
    selects = name not in (TOPK, COPY)
    rate = break_even(n, timing.count, ranks, middle) if selects else None
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
        break_even_bits_per_s=rate,
    )


Progress = Callable[[list[Result], list[DenseTime]], None]


@dataclass(frozen=True)
class Plan:
    """What to measure. Rates are in bits/s and serve for the wire's times only."""

    sizes: Sequence[int]
    densities: Sequence[float]
    rates: Sequence[float]
    ranks: int = 8
    threads: int = 1
    device: str = "cpu"
    repeats: int = 15  # rounds of each, at most
    seconds: float = 1.0  # for each, about

    def __post_init__(self) -> None:
        wrong = {
            "sizes are numbers of elements, 1 or more each, up to 1e15": (
                not self.sizes or not all(1 <= n <= 1e15 for n in self.sizes)
            ),
            "densities are shares of the elements: above 0, at most 1": (
                not self.densities or not all(0 < d <= 1 for d in self.densities)
            ),
            f"{self.ranks} ranks exchange nothing: choose 2 or more": self.ranks < 2,
            f"{self.repeats} repeats: at least 1 is needed": self.repeats < 1,
        }
        refuse(wrong)
        check_threads(self.threads)
        check_device(self.device)
        _check_memory(max(self.sizes), self.device)


def run(plan: Plan, argv: Sequence[str], progress: Progress) -> Record:
    """Measure everything; `progress` is called with the results of each size."""
    results, dense = [], dense_times(plan.sizes, plan.rates, plan.ranks)
    selectors = {selector.__name__: selector() for selector in SELECTORS}
    effort = selectors, plan.repeats, plan.seconds
    with threads(plan.threads):
        for n in plan.sizes:
            gradients = Gradients(n, torch.device(plan.device))
            found = [
                row(name, n, density, plan.ranks, timing)
                for density in plan.densities
                for name, timing in measure(gradients, density, *effort).items()
            ]
            progress(found, dense)
            results += found
    kind, device = torch.device(plan.device), plan.device
    return Record(
        origin(argv, "numba", "triton"),
        device=torch.cuda.get_device_name(kind) if kind.type == "cuda" else device,
        threads=plan.threads,
        ranks=plan.ranks,
        dense=dense,
        results=results,
    )


def _check_memory(n: int, device: str) -> None:
    """Residuals of all selectors, pool and copy; and what torch.topk takes on a CPU."""
    import psutil

    needed = 4 * n * (len(SELECTORS) + 3) + 24 * n
    free = psutil.virtual_memory().available
    if torch.device(device).type == "cpu" and needed > free:
        raise ValueError(
            f"{n:,} elements take about {needed / 1e9:.1f} GB, of which "
            f"{free / 1e9:.1f} are free: leave the largest of --sizes out"
        )
