"""What every rank of a race does: contestants train in turn, each on its own clock.

[Note: Whose turn] Contestants train in laps of as many steps as were asked for. The
next lap is of the one who has trained for the shortest time, so that whatever else
happens on the machine hits all alike. Rank 0's clock says who that is, and rank 0 tells
the others: no rank decides by a clock of its own.

A contestant's clock runs in its laps, from a barrier to another after the flush. It
stands while the held-out loss is taken, and while others train.

[Note: A steady rate] After its warm-up the learning rate stays. Nobody in a race knows
how many steps he will take, and one who takes more of them would otherwise see a lower
rate sooner, which is no merit of what he sends.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gradtide.lab.contestants import Contestant, enter
from gradtide.lab.devices import backend
from gradtide.lab.job import Tell, from_everybody, joined, silent
from gradtide.lab.race.standings import Point
from gradtide.lab.spec import RaceSpec
from gradtide.lab.trial import Runner
from gradtide.lab.workloads import Workload

WARM_UP_STEPS = 20  # of the learning rate


def run(spec: RaceSpec, tell: Tell) -> dict[str, list[Point]] | None:
    """Race on this rank; on rank 0 the course of everybody who trained, else None.

    Expects torchrun's environment. Rank 0 tells after each lap who trained it, and for
    how many seconds all have.
    """
    with joined(backend(spec.device)) as (rank, size):
        # Rank 0 alone may have the record of who has trained before.
        missing = [spec.missing]
        dist.broadcast_object_list(missing)
        racers = [
            Racer(enter(name, steady(spec.build(rank)), size), rank)
            for name in missing[0]
        ]
        report = silent if rank else tell
        gc.disable()
        gc.collect()
        gc.freeze()  # what is there stays: only what laps leave behind is looked at
        while (turn := _turn(racers, spec.seconds)) is not None:
            racers[turn].lap(spec.every)
            total = sum(min(racer.seconds, spec.seconds) for racer in racers)
            report(f"{total:.1f} {racers[turn].contestant.name}")
        gc.unfreeze()
        gc.enable()
        for racer in racers:
            racer.contestant.leave()
    return None if rank else {r.contestant.name: r.points for r in racers}


class Racer:
    """One contestant, the seconds it has trained, and on rank 0 its course."""

    def __init__(self, contestant: Contestant, rank: int) -> None:
        self.contestant, self.rank = contestant, rank
        self.runner = Runner(contestant, silent)
        self.seconds = 0.0
        self.points: list[Point] = []
        self._sent_before = self.runner.sent()  # to begin with the same parameters
        if contestant.workload.evaluate is not None:
            self._look()

    def lap(self, num_steps: int) -> None:
        """Train and look; every rank must call this."""
        gc.collect()  # here, so that it never runs in a step
        dist.barrier()
        start = time.perf_counter()
        self.runner.steps(num_steps)
        dist.barrier()
        self.seconds += time.perf_counter() - start
        self._look()

    def _look(self) -> None:
        """Take the held-out loss on rank 0, whose parameters are everybody's.

        In the middle of a round they are those that all agreed on last. Of what has no
        held-out loss it is that of training, the mean of a lap over all ranks.
        """
        workload = self.contestant.workload
        if workload.evaluate is None:
            loss = fmean(from_everybody(self.runner.mean_loss))
        elif self.rank == 0:
            with self.contestant.agreed():
                loss = workload.evaluate(workload.model)["loss"]
        if self.rank != 0:
            return
        sent = self.runner.sent() - self._sent_before
        self.points.append(Point(self.seconds, self.runner.next_step, sent, loss))


def steady(workload: Workload) -> Workload:
    """The workload with a schedule that stays at its peak, if it has a schedule."""
    return replace(workload, scheduler=workload.scheduler and warm_up)


def warm_up(optimizer: Optimizer) -> LambdaLR:
    """The learning rate grows from step to step, then stays."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))


def _turn(racers: Sequence[Racer], seconds: float) -> int | None:
    """Whose lap is next, by rank 0's clock; None at the end. A collective call."""
    times = [racer.seconds for racer in racers]
    least = min(times, default=seconds)
    chosen = [times.index(least) if least < seconds else None]
    dist.broadcast_object_list(chosen)
    return chosen[0]
