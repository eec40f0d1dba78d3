"""Trains contestants in turn, and takes the time.

Knows clocks and counters; knows nothing of what the numbers mean (`summary`).

[Note: What is timed] A round gives every contestant a block of consecutive steps, with
a barrier before it and a flush after it. The first step of a block is not timed: DeAR's
second half of a step hides in the step that follows, so only from the second step on
does a step carry what a step costs. The time of a step runs from loop top to loop top.
Where ranks step alone for rounds of several steps (`Schedule.every`), a block is made
longer, to whole rounds, for only together do their steps carry what they cost.
Bytes and CPU seconds are those of whole blocks, from barrier to after the flush,
divided by all steps of the block: there the count is exact. On a device the host waits
for what is computed at the end of every phase, so that phases are those of the device,
and for nothing that travels.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.core.telemetry import Interval, Record, Telemetry
from gradtide.kfac.stages import Stages
from gradtide.lab.contestants import Contestant
from gradtide.lab.devices import device_of, finish
from gradtide.lab.job import Tell


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
    selected: int = 0  # entries that travelled,
    offered: int = 0  # of all; 0 where everything travels
    interface_bytes: float | None = None  # of the host's link, for all of its ranks
    cpu_seconds: float = 0.0
    loss: float = 0.0  # of the last step
    evaluation: dict[str, float] | None = None
    stages: Stages | None = None  # of K-FAC, busy seconds


def link_bytes(interface: str) -> int:
    """What a link has sent by its own counter; 0 of none (an empty name)."""
    counter = Path("/sys/class/net", interface, "statistics", "tx_bytes")
    return int(counter.read_text()) if interface else 0


class Runner:
    """One contestant, and the number of its next step."""

    def __init__(self, contestant: Contestant, tell: Tell) -> None:
        self.contestant, self.tell = contestant, tell
        self.trial = Trial(contestant.name)
        self._device = device_of(contestant.workload.model)
        make = contestant.workload.scheduler
        self.scheduler = make and make(contestant.workload.optimizer)
        self.next_step = 0
        self.mean_loss = math.nan  # of the last steps

    def steps(self, count: int) -> list[Step]:
        """`count` consecutive steps, then a flush."""
        done, losses = [], []
        for _ in range(count):
            step, loss = self._step()
            self.next_step += 1
            done.append(step)
            losses.append(loss)
            self.tell(self.contestant.name)
        self.contestant.flush()
        self.trial.loss = loss.item()
        self.mean_loss = float(torch.stack(losses).mean())
        return done

    def round(self, num_timed: int, interface: str) -> None:
        """One block; see [Note: What is timed]."""
        every = self.contestant.schedule.every
        num_timed = -(-num_timed // every) * every
        trial, replica = self.trial, self.contestant.replica
        kfac = None if replica is None else replica.kfac
        gc.collect()  # here, so that it never runs in a step
        if kfac is not None:
            kfac.clear()
        elif replica is not None:
            replica.engine.telemetry.clear()
        sent = self.sent()
        dist.barrier()
        link, cpu = link_bytes(interface), time.process_time()
        steps = self.steps(num_timed + 1)
        trial.cpu_seconds += time.process_time() - cpu
        dist.barrier()
        if interface:
            link = link_bytes(interface) - link
            trial.interface_bytes = (trial.interface_bytes or 0.0) + link
        trial.timed += steps[1:]
        trial.num_steps += len(steps)
        trial.payload_bytes += self.sent() - sent
        if replica is not None:
            self._see(replica.engine.telemetry)
        if kfac is not None:
            before, found = trial.stages or Stages(), kfac.stages()
            trial.stages = Stages(*map(sum, zip(before, found, strict=True)))

    def _see(self, seen: Telemetry) -> None:
        trial = self.trial
        trial.applied += seen.applied
        trial.records = list(seen.records)
        trial.gathered_bytes += sum(r.payload_bytes for r in seen.records if r.second)
        if self.contestant.sparse:
            trial.select_seconds = (trial.select_seconds or 0.0) + seen.select_seconds
            trial.selected += seen.selected
            trial.offered += seen.offered

    def evaluate(self) -> None:
        """Score the model as it is; every rank must call this."""
        score = self.contestant.workload.evaluate
        if score is not None:
            with self.contestant.agreed():
                self.trial.evaluation = score(self.contestant.module)
            self.contestant.flush()

    def sent(self) -> float:
        """Bytes that this rank has sent for the contestant up to now."""
        engine = self.contestant.engine
        if engine is None:
            return self.contestant.payload_bytes * self.next_step
        return engine.transport.payload_bytes

    def _step(self) -> tuple[Step, Tensor]:
        workload = self.contestant.workload
        begin = self._mark()
        loss = workload.loss(self.contestant.module, workload.batch(self.next_step))
        forward = self._mark()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = self._mark()
        if workload.max_norm is not None:
            self.contestant.clip(workload.max_norm)
        workload.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        workload.optimizer.zero_grad()
        return Step(begin, forward, backward, self._mark()), loss.detach()

    def _mark(self) -> Mark:
        finish(self._device)
        engine = self.contestant.engine
        waited = 0.0 if engine is None else engine.telemetry.exposed_seconds
        return Mark(time.perf_counter(), waited)


def compete(
    contestants: Sequence[Contestant],
    warmup: int,
    blocks: Sequence[int],
    interface: str,
    tell: Tell,
) -> list[Trial]:
    """Warm up everybody, then let them alternate; the first changes with the round.

    `blocks` holds the timed steps of each round; `interface` is the link whose bytes
    count, empty for none. `tell` is called with the contestant's name after each step.
    """
    runners = [Runner(contestant, tell) for contestant in contestants]
    gc.disable()
    for runner in runners:
        runner.steps(warmup)
    gc.collect()
    gc.freeze()
    for index, num_timed in enumerate(blocks):
        first = index % len(runners)
        for runner in runners[first:] + runners[:first]:
            runner.round(num_timed, interface)
    for runner in runners:
        runner.evaluate()
    gc.unfreeze()
    gc.enable()
    return [runner.trial for runner in runners]
