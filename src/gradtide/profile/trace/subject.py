"""What is traced: a model of the user's by a dotted path, or a workload of the lab."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.lab import workloads

USAGE = (
    "write a function without arguments that returns (model, optimizer, loss), where "
    "loss() computes the loss of one batch, and name it as package.module:function"
)


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
    path = list(sys.path)
    try:
        _factory(wanted)
    finally:
        sys.path[:] = path  # ranks would look in the current folder first


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
    return _made(wanted.what, _factory(wanted))


def _factory(wanted: Wanted) -> Callable[[], Any]:
    """The function that was named; ValueError where there is none."""
    if ":" not in wanted.what:
        known = ", ".join(workloads.WORKLOADS)
        raise ValueError(
            f"{wanted.what!r} is no workload ({known}), nor has it a colon: {USAGE}"
        )
    if wanted.step_ms or wanted.times or wanted.batch_size:
        raise ValueError(
            f"{wanted.what} says itself what a step is: --step-ms, --times and "
            "--batch-size are for workloads of the lab"
        )
    name, _, attribute = wanted.what.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` would
    try:
        module = import_module(name)
    # A module of the user's may raise anything, or be a script that exits.
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise ValueError(
                f"{name!r} cannot be imported, {_said(error)}: correct it first"
            ) from error
        raise ValueError(
            f"there is no module {missing} here ({wanted.what}): start gradtide in the "
            "folder that holds it, or install it"
        ) from None
    factory: Callable[[], Any] | None = getattr(module, attribute, None)
    if not callable(factory):
        raise ValueError(f"{name} has no function {attribute!r}: {USAGE}")
    return factory


def _made(path: str, factory: Callable[[], Any]) -> Subject:
    try:
        made = factory()
    except Exception as error:  # the user's may raise anything
        raise ValueError(
            f"{path} raised {_said(error)}: call it in Python to see where"
        ) from error
    if not isinstance(made, Sequence) or len(made) != 3:
        raise ValueError(f"{path} returned {_kind(made)}: {USAGE}")
    model, optimizer, loss = made
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path}: the model is {_kind(model)}: {USAGE}")
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"{path}: the optimizer is {_kind(optimizer)}: {USAGE}")
    if not callable(loss):
        raise ValueError(f"{path}: loss is {_kind(loss)}, no function: {USAGE}")
    return Subject(path, model, optimizer, lambda step: _checked(path, loss()))


def _checked(path: str, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"{path}: loss() returned {_kind(loss)}: return a tensor of one element "
            "that was computed by the model, without no_grad()"
        )
    return loss


def _said(error: BaseException) -> str:
    """An error's class, and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
