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
    times: str | None = None  # a file with the times of layers, for a replay
    batch_size: int | None = None
    seed: int = 0


def build(wanted: Wanted, rank: int = 0, size: int = 1) -> Subject:
    """The subject as this rank sees it; ValueError says what a factory has to be."""
    known = [name for name, _ in workloads.WORKLOADS]
    if wanted.what in known or wanted.what.startswith("replay:"):
        return _workload(wanted, rank, size)
    if ":" not in wanted.what:
        raise ValueError(
            f"{wanted.what!r} is no workload ({', '.join(known)}), nor has it a colon: "
            f"{USAGE}"
        )
    if wanted.step_ms or wanted.times or wanted.batch_size:
        raise ValueError(
            f"{wanted.what} says itself what a step is: --step-ms, --times and "
            "--batch-size are for workloads of the lab"
        )
    return _made(wanted.what)


def _workload(wanted: Wanted, rank: int, size: int) -> Subject:
    made = workloads.build(
        wanted.what,
        rank=rank,
        size=size,
        seed=wanted.seed,
        step_ms=wanted.step_ms,
        trace=None if wanted.times is None else Path(wanted.times),
        batch_size=wanted.batch_size,
    )
    return Subject(
        made.name,
        made.model,
        made.optimizer,
        lambda step: made.loss(made.model, made.batch(step)),
        made.replayed,
    )


def _made(path: str) -> Subject:
    made = _factory(path)()
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


def _factory(path: str) -> Callable[[], Any]:
    name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` would
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {error.name} here ({path}): start gradtide in the "
            "folder that holds it, or install it"
        ) from None
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ValueError(f"{name} has no function {attribute!r}: {USAGE}")
    found: Callable[[], Any] = factory
    return found


def _checked(path: str, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"{path}: loss() returned {_kind(loss)}: return a tensor of one element "
            "that was computed by the model, without no_grad()"
        )
    return loss


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
