"""Trains a subject for a few steps under a watch: alone, or all ranks at once.

[Note: At once] Ranks that share a machine's cores slow each other down, most of all in
what all do at the same time. So they begin every step together, and the medians over
ranks are what a step costs each of them. In training an exchange brings all ranks to
the optimizer at the same time, and the next one waits for the last of them: here they
begin that together, too, and the slowest counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.kfac import KFAC
from gradtide.kfac.layers import KINDS, Kind, Layer, supported
from gradtide.kfac.packing import pack
from gradtide.kfac.statistics import Statistics
from gradtide.lab.cluster import Cluster
from gradtide.lab.job import from_everybody, gathered, joined, on_every_rank
from gradtide.planner.measuring.medians import across
from gradtide.planner.trace import Factors, StepTrace
from gradtide.planner.watch import Watch
from gradtide.profile.device import check_threads, threads
from gradtide.profile.trace.subject import Subject, Wanted, build, check

MOST = 5  # timed steps for factors


@dataclass(frozen=True)
class Effort:
    """How many steps are timed, and how many go before; threads: torch's choice."""

    steps: int = 10
    warmup: int = 3
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise ValueError(
                f"{self.steps} steps after {self.warmup}: time 1 or more after 0"
            )
        if self.threads is not None:
            check_threads(self.threads)


def trace(subject: Subject, effort: Effort) -> StepTrace:
    """The typical step of a subject: see [Note: At once].

    A collective call, where there is a default process group.
    """
    watch = Watch(subject.model, subject.optimizer, effort.steps, effort.warmup)
    worked = []
    try:
        for step in range(effort.warmup + effort.steps):
            _together()
            begin = time.process_time()
            subject.loss(step).backward()  # type: ignore[no-untyped-call]
            _together()
            subject.optimizer.step()
            subject.optimizer.zero_grad()
            worked.append(time.process_time() - begin)
    finally:
        watch.remove()
    updates = watch.updates()
    if dist.is_initialized():  # the slowest of all ranks counts
        updates = [max(each) for each in zip(*from_everybody(updates), strict=True)]
    found = watch.trace(subject.name).optimized(median(updates))
    layers = _factors(subject, effort.steps)
    processor = median(worked[effort.warmup :])
    return replace(found, replayed=subject.replayed, layers=layers, processor=processor)


def _together() -> None:
    """Return when all ranks have come here."""
    if dist.is_initialized():
        dist.barrier()


def _factors(subject: Subject, steps: int) -> tuple[Factors, ...]:
    """The layers that K-FAC could precondition, with the median seconds of factors.

    Found in up to MOST steps of their own, in which the optimizer does not step, after
    one in which nobody knows how often a layer is called. None on an accelerator, which
    computes when nobody looks.
    """
    layers = supported(subject.model, KFAC().max_dim)
    if not layers or layers[0].weight.device.type != "cpu":
        return ()
    packed = {(la, k): torch.empty(la.numel(k)) for la in layers for k in KINDS}

    def ready(layer: Layer, kind: Kind, factor: Tensor) -> None:
        pack(factor, packed[layer, kind])

    statistics = Statistics(subject.model, layers, ready)
    times = []
    for step in range(1 + min(steps, MOST)):
        _together()
        statistics.arm()
        subject.loss(step).backward()  # type: ignore[no-untyped-call]
        times.append(statistics.spent())
        statistics.finish()
        subject.optimizer.zero_grad()
    names = {p: name for name, p in subject.model.named_parameters()}
    return tuple(
        Factors(
            names[layer.weight],
            None if layer.bias is None else names[layer.bias],
            a=median(spent[layer, "A"] for spent in times[1:]),
            g=median(spent[layer, "G"] for spent in times[1:]),
            groups=layer.groups,
        )
        for layer in layers
    )


def here(wanted: Wanted, effort: Effort) -> StepTrace:
    with threads(effort.threads):
        return trace(build(wanted), effort)


def among(wanted: Wanted, effort: Effort) -> StepTrace | None:
    """Trace as one of the ranks that torchrun or the lab has started, all at once.

    The median over ranks on rank 0, None elsewhere.
    """
    with threads(effort.threads), joined() as (rank, size):
        found = gathered(trace(build(wanted, rank, size), effort))
    return None if found is None else across(found)


def copies(wanted: Wanted, effort: Effort, ranks: int) -> StepTrace:
    """Trace so many ranks on this machine at once. LabError where one fails."""
    cluster = Cluster(ranks)
    check(wanted, ranks)
    return on_every_rank(cluster, among, wanted, effort)
