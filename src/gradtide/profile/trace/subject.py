"""What is traced: a model of the user's by a dotted path, or a workload of the lab."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.lab import workloads
from gradtide.lab.workloads import own


@dataclass(frozen=True)
class Subject:
    """A model in training. `loss` is given the number of the step."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[int], Tensor]
    replayed: bool = False


@dataclass(frozen=True)
class Wanted:
    """What was asked for: `package.module:function`, or a workload and its options."""

    what: str
    step_ms: float | None = None
    times: Path | None = None  # a file with the times of layers, for a replay
    batch_size: int | None = None


def check(wanted: Wanted, size: int) -> None:
    """Raise ValueError for what is known to be wrong before `size` ranks build it."""
    if _in_lab(wanted):
        how = wanted.step_ms, wanted.times, wanted.batch_size
        workloads.check(wanted.what, size, *how)
        return
    _check_own(wanted)
    own.check(wanted.what)


def _in_lab(wanted: Wanted) -> bool:
    return wanted.what in workloads.WORKLOADS or wanted.what.startswith("replay:")


def build(wanted: Wanted, rank: int = 0, size: int = 1) -> Subject:
    """The subject as this rank sees it; ValueError says what a factory has to be."""
    if _in_lab(wanted):
        how = wanted.step_ms, wanted.times, wanted.batch_size
        made = workloads.build(wanted.what, rank, size, 0, *how)
        return Subject(
            made.name,
            made.model,
            made.optimizer,
            lambda step: made.loss(made.model, made.batch(step)),
            made.waits is not None,
        )
    _check_own(wanted)
    mine = own.make(wanted.what)
    return Subject(wanted.what, mine.model, mine.optimizer, lambda step: mine.loss())


def _check_own(wanted: Wanted) -> None:
    if not own.is_own(wanted.what):
        known = ", ".join(workloads.WORKLOADS)
        raise ValueError(
            f"{wanted.what!r} is no workload ({known}), nor has it a colon: {own.USAGE}"
        )
    if wanted.step_ms or wanted.times or wanted.batch_size:
        raise ValueError(
            f"{wanted.what} says itself what a step is: --step-ms, --times and "
            "--batch-size are for workloads of the lab"
        )
