"""What measuring needs of a transport: requests, clocks, and that all ranks agree.

[Note: Agreement] Which request comes next, how many points are taken and when a phase
ends follows from what all ranks have gathered, never from a rank's own clock. Whatever
a rank might raise by itself it raises inside of `Bench.everyone`, between requests, so
that no rank waits for an answer that will never come: all raise instead. (Guard:
tests/planner/measuring/test_bench.py.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradtide.core.ops import Group, Op
from gradtide.core.transport import Job
from gradtide.transport import CommunicationError, Transport

T = TypeVar("T")


class RankError(RuntimeError):
    """What a rank has raised by itself; all ranks raise this."""


@dataclass
class Bench:
    """Makes requests on a transport, whose ranks all do the same at the same time."""

    transport: Transport
    device: torch.device
    tell: Callable[[str], None] = lambda words: None  # what comes next, in words

    @property
    def group(self) -> Group:
        return self.transport.group

    def now(self) -> float:
        """This rank's time, when all that was asked of the device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def ask(self, op: Op) -> Callable[[], None]:
        """Put a request in line; what is returned waits for the answer."""
        pending: list[Any] = []
        job = Job(
            lambda: pending.append(self.transport.issue(op)),
            lambda: self.transport.wait(pending.pop()),
        )
        return self.transport.submit(job).join

    def everyone(self, work: Callable[[], T]) -> list[T]:
        """What `work` returns on each rank, in rank order, on all of them.

        `work` makes no requests. Returns when all ranks have come here; all of them
        raise RankError where `work` raises on one.
        """
        error: Exception | None = None
        try:
            told: tuple[str | None, T | None] = None, work()
        except CommunicationError:
            raise
        except Exception as raised:  # whatever it is, the others have to know
            error, told = raised, (f"{type(raised).__name__}: {raised}", None)
        found = self.transport.gather_objects(told)
        for rank, (words, _) in enumerate(found):
            if words is not None:
                raise RankError(f"rank {rank} raised {words}") from error
        return [each for _, each in found]

    def prepared(self, make: Callable[[], T]) -> T:
        """What `make` returns, which stays on this rank, once all ranks have theirs."""
        made: list[T] = []
        self.everyone(lambda: made.append(make()))
        return made[0]

    def first(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0."""
        return self.everyone(work)[0]

    def middle(self, work: Callable[[], float]) -> float:
        """The median over ranks of what `work` returns."""
        return median(self.everyone(work))

    def taken(self, times: int, *steps: Callable[[], object]) -> float:
        """Seconds of making all steps in turn, the mean of so many times.

        The median over ranks, of which all make as many: messages are known by the
        number of their request.
        """
        begin = self.now()
        for _ in range(times):
            for step in steps:
                step()
        spent = (self.now() - begin) / times
        return self.middle(lambda: spent)

    def empty(self, nbytes: float) -> Tensor:
        """Zeros, in a number that all ranks can divide among them."""
        size = self.group.size
        numel = max(1, round(nbytes / torch.float32.itemsize / size)) * size
        return torch.zeros(numel, device=self.device)
