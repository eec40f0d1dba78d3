"""Trains contestants in turn, and takes the time.

Knows clocks and counters; knows nothing of what the numbers mean (`summary`).

[Note: What is timed] A round gives every contestant a block of consecutive steps, with
a barrier before it and a flush after it. The first step of a block is not timed: DeAR's
second half of a step hides in the step that follows, so only from the second step on
does a step carry what a step costs. The time of a step runs from loop top to loop top.
Bytes and CPU seconds are those of whole blocks, from barrier to after the flush,
divided by all steps of the block: there the count is exact.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from gradtide.kfac.stages import Stages
from gradtide.lab.contestants import Contestant
from gradtide.telemetry import Record, Telemetry

Interval = tuple[float, float]  # seconds of time.perf_counter()


class Mark(NamedTuple):
    """A moment, and the seconds that communication has exposed up to it."""

    time: float
    exposed: float


class Step(NamedTuple):
    """Where one step of one rank began and where its phases ended."""

    begin: Mark
    forward: Mark
    backward: Mark
    end: Mark

    def waited(self) -> list[float]:
        """Seconds of waiting for communication in each of the three phases."""
        return [b.exposed - a.exposed for a, b in pairwise(self)]


@dataclass
class Trial:
    """What one rank measured of one contestant, over all rounds."""

    name: str
    timed: list[Step] = field(default_factory=list)
    applied: list[Interval] = field(default_factory=list)  # deferred updates
    records: list[Record] = field(default_factory=list)  # of the last round
    num_steps: int = 0  # over which the following are sums, this rank's
    payload_bytes: float = 0.0
    gathered_bytes: float = 0.0  # of them, after the turn of the exchange
    select_seconds: float | None = None  # None where everything travels
    density: float | None = None  # entries that travelled, of all
    interface_bytes: float | None = None  # of the host's link, for all of its ranks
    cpu_seconds: float = 0.0
    loss: float = 0.0  # of the last step
    evaluation: dict[str, float] | None = None
    stages: Stages | None = None  # of K-FAC, busy seconds


class Clock:
    """Counters outside of the process's own Python: the link's, and the CPU's."""

    def __init__(self, interface: str) -> None:
        """`interface` is the link's name, empty where no link is counted."""
        statistics = Path("/sys/class/net", interface, "statistics", "tx_bytes")
        self._sent = statistics if interface else None

    def link_bytes(self) -> int | None:
        return None if self._sent is None else int(self._sent.read_text())

    def cpu_seconds(self) -> float:
        """Of all threads of this process."""
        return time.process_time()


class Runner:
    """One contestant, and the number of its next step."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant, self.trial = contestant, Trial(contestant.name)
        self.next_step = 0
        self._selected = self._offered = 0  # entries

    def steps(self, count: int, report: Callable[[], None]) -> list[Step]:
        """`count` consecutive steps, then a flush."""
        done = []
        for _ in range(count):
            step, loss = _step(self.contestant, self.next_step)
            self.next_step += 1
            done.append(step)
            report()
        self.contestant.flush()
        self.trial.loss = loss.item()
        return done

    def round(self, num_timed: int, clock: Clock, report: Callable[[], None]) -> None:
        """One block; see [Note: What is timed]."""
        trial, engine = self.trial, self.contestant.engine
        kfac = self.contestant.kfac
        gc.collect()  # here, so that it never runs in a step
        if kfac is not None:
            kfac.clear()
        elif engine is not None:
            engine.telemetry.clear()
        sent = self._sent()
        dist.barrier()
        link, cpu = clock.link_bytes(), clock.cpu_seconds()
        steps = self.steps(num_timed + 1, report)
        trial.cpu_seconds += clock.cpu_seconds() - cpu
        dist.barrier()
        if link is not None:
            after = clock.link_bytes() or link
            trial.interface_bytes = (trial.interface_bytes or 0.0) + after - link
        trial.timed += steps[1:]
        trial.num_steps += len(steps)
        trial.payload_bytes += self._sent() - sent
        if engine is not None:
            seen = engine.telemetry
            trial.applied += seen.applied
            trial.records = list(seen.records)
            trial.gathered_bytes += sum(
                r.payload_bytes for r in seen.records if r.second
            )
            if self.contestant.sparse:
                self._selection(seen)
        if kfac is not None:
            before, found = trial.stages or Stages(), kfac.stages()
            trial.stages = Stages(*map(sum, zip(before, found, strict=True)))

    def _selection(self, seen: Telemetry) -> None:
        trial = self.trial
        trial.select_seconds = (trial.select_seconds or 0.0) + seen.select_seconds
        self._selected += seen.selected
        self._offered += seen.offered
        trial.density = self._selected / self._offered

    def evaluate(self) -> None:
        """Score the model as it is; every rank must call this."""
        score = self.contestant.workload.evaluate
        if score is not None:
            self.trial.evaluation = score(self.contestant.module)
            self.contestant.flush()

    def _sent(self) -> float:
        engine = self.contestant.engine
        if engine is None:
            return self.contestant.payload_bytes * self.next_step
        return engine.transport.payload_bytes


def compete(
    contestants: Sequence[Contestant],
    warmup: int,
    blocks: Sequence[int],
    clock: Clock,
    report: Callable[[str], None],
) -> list[Trial]:
    """Warm up everybody, then let them alternate; the first changes with the round.

    `blocks` holds the timed steps of each round. `report` is called with the
    contestant's name after each step.
    """
    runners = [Runner(contestant) for contestant in contestants]
    gc.disable()
    for runner in runners:
        name = runner.contestant.name
        runner.steps(warmup, lambda name=name: report(name))  # type: ignore[misc]
        runner.contestant = runner.contestant.settled()
    gc.collect()
    gc.freeze()
    for index, num_timed in enumerate(blocks):
        first = index % len(runners)
        for runner in runners[first:] + runners[:first]:
            name = runner.contestant.name
            runner.round(num_timed, clock, lambda name=name: report(name))  # type: ignore[misc]
    for runner in runners:
        runner.evaluate()
    gc.unfreeze()
    gc.enable()
    return [runner.trial for runner in runners]


def _step(contestant: Contestant, number: int) -> tuple[Step, Tensor]:
    workload = contestant.workload
    begin = _mark(contestant)
    loss = workload.loss(contestant.module, workload.batch(number))
    forward = _mark(contestant)
    loss.backward()  # type: ignore[no-untyped-call]
    backward = _mark(contestant)
    if workload.max_norm is not None:
        contestant.clip(workload.max_norm)
    workload.optimizer.step()
    if contestant.scheduler is not None:
        contestant.scheduler.step()
    workload.optimizer.zero_grad()
    return Step(begin, forward, backward, _mark(contestant)), loss.detach()


def _mark(contestant: Contestant) -> Mark:
    engine = contestant.engine
    waited = 0.0 if engine is None else engine.telemetry.exposed_seconds
    return Mark(time.perf_counter(), waited)
