"""Trains a subject for a few steps under a watch: alone, or all ranks at once.

[Note: At once] Ranks that share a machine's cores slow each other down, most of all in
what all do at the same time. So they begin every step together, and the medians over
ranks are what a step costs each of them. In training an exchange brings all ranks to
the optimizer at the same time, and the next one waits for the last of them: here they
begin that together, too, and the slowest counts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from gradtide.lab import group
from gradtide.lab.cluster import Cluster
from gradtide.lab.launch import launch
from gradtide.plan.medians import across
from gradtide.plan.trace import StepTrace, load
from gradtide.plan.watch import Watch
from gradtide.profile.trace.factors import factors
from gradtide.profile.trace.subject import Subject, Wanted, build


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
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"{self.threads} threads: at least 1 is needed")


class Alone:
    """One process, which nobody waits for."""

    def together(self) -> None:
        """Return when all have come here."""

    def slowest(self, seconds: Sequence[float]) -> Sequence[float]:
        """Of each number, the greatest of all ranks."""
        return seconds


class Everyone(Alone):
    """All ranks of the default process group."""

    def together(self) -> None:
        dist.barrier()

    def slowest(self, seconds: Sequence[float]) -> Sequence[float]:
        found: list[Sequence[float]] = [()] * dist.get_world_size()
        dist.all_gather_object(found, seconds)
        return [max(each) for each in zip(*found, strict=True)]


ALONE = Alone()


def trace(subject: Subject, effort: Effort, ranks: Alone = ALONE) -> StepTrace:
    """The typical step of a subject: see [Note: At once]."""
    watch = Watch(subject.model, subject.optimizer, effort.steps, effort.warmup)
    worked = []
    try:
        for step in range(effort.warmup + effort.steps):
            ranks.together()
            begin = time.process_time()
            subject.loss(step).backward()  # type: ignore[no-untyped-call]
            ranks.together()
            subject.optimizer.step()
            subject.optimizer.zero_grad()
            worked.append(time.process_time() - begin)
    finally:
        watch.remove()
    optimizer = median(ranks.slowest(watch.updates()))
    found = watch.trace(subject.name).optimized(optimizer)
    layers = factors(subject, effort.steps, ranks.together)
    processor = median(worked[effort.warmup :])
    return replace(found, replayed=subject.replayed, layers=layers, processor=processor)


def here(wanted: Wanted, effort: Effort) -> StepTrace:
    """Trace in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(effort.threads or threads)
    try:
        return trace(build(wanted), effort)
    finally:
        torch.set_num_threads(threads)


def among(wanted: Wanted, effort: Effort) -> StepTrace | None:
    """Trace as one of the ranks that torchrun or the lab has started, all at once.

    The median over ranks on rank 0, None elsewhere.
    """
    if effort.threads is not None:
        torch.set_num_threads(effort.threads)
    group.begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    found = trace(build(wanted, rank, size), effort, Everyone())
    gathered: list[StepTrace] | None = None
    if rank == 0:
        gathered = [found] * size
    dist.gather_object(found, gathered)
    dist.destroy_process_group()
    return None if gathered is None else across(gathered)


def copies(wanted: Wanted, effort: Effort, ranks: int) -> StepTrace:
    """Trace so many ranks on this machine at once. LabError where one fails."""
    with tempfile.TemporaryDirectory(prefix="gradtide-") as folder:
        answer = Path(folder, "trace.json")
        asked = json.dumps([asdict(wanted), asdict(effort), str(answer)])
        module = "gradtide.profile.trace.run"
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        launch(Cluster(ranks), [sys.executable, "-m", module, asked], env=environment)
        return load(answer)


def _main(asked: str) -> None:
    wanted, effort, answer = json.loads(asked)
    found = among(Wanted(**wanted), Effort(**effort))
    if found is not None:
        found.save(Path(answer))


if __name__ == "__main__":
    _main(sys.argv[1])
