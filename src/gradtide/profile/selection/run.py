"""A profile of selection from what was asked to the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from gradtide.lab.record import command_line, commit, machine, versions
from gradtide.profile.selection.findings import (
    DenseTime,
    Record,
    Result,
    dense_times,
    rows,
)
from gradtide.profile.selection.measure import Effort, Gradients, measure
from gradtide.select import SELECTORS

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
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError("sizes are numbers of elements, 1 or more each")
        if (
            not self.densities
            or not 0 < min(self.densities) <= max(self.densities) <= 1
        ):
            raise ValueError("densities are shares of the elements: above 0, at most 1")
        if self.ranks < 2:
            raise ValueError(f"{self.ranks} ranks exchange nothing: choose 2 or more")
        if self.threads < 1:
            raise ValueError(f"{self.threads} threads: at least 1 is needed")
        _check_device(self.device)
        _check_memory(max(self.sizes), self.device)


def run(plan: Plan, argv: Sequence[str], progress: Progress) -> Record:
    """Measure everything; `progress` is called with the results of each size."""
    before = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    results = []
    try:
        for n in plan.sizes:
            found = _size(plan, n)
            progress(found, dense_times([n], plan.rates, plan.ranks))
            results += found
    finally:
        torch.set_num_threads(before)
    return Record(
        command=command_line(argv),
        commit=commit(),
        versions=versions() | _optional("numba") | _optional("triton"),
        machine=machine(),
        device=_device_name(plan.device),
        threads=plan.threads,
        ranks=plan.ranks,
        dense=dense_times(plan.sizes, plan.rates, plan.ranks),
        results=results,
    )


def _size(plan: Plan, n: int) -> list[Result]:
    selectors = {selector.__name__: selector() for selector in SELECTORS}
    gradients = Gradients(n, torch.device(plan.device))
    found = []
    for density in plan.densities:
        timings = measure(gradients, density, selectors, plan.effort)
        found += rows(n, density, plan.ranks, timings)
    return found


def _check_device(name: str) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name}: {reason} Use cpu, or cuda.") from None


def _check_memory(n: int, device: str) -> None:
    """Residuals of all selectors, pool and copy; and what torch.topk takes on a CPU."""
    needed = 4 * n * (len(SELECTORS) + 3) + 24 * n
    free = psutil.virtual_memory().available
    if torch.device(device).type == "cpu" and needed > free:
        raise ValueError(
            f"{n:,} elements take about {needed / 1e9:.1f} GB, of which "
            f"{free / 1e9:.1f} are free: leave the largest of --sizes out"
        )


def _device_name(device: str) -> str:
    kind = torch.device(device)
    return torch.cuda.get_device_name(kind) if kind.type == "cuda" else device


def _optional(package: str) -> dict[str, str]:
    try:
        return {package: version(package)}
    except PackageNotFoundError:
        return {}
