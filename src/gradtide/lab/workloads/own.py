"""What a user trains, by the dotted path of a function that builds it.

One contract for all commands: `profile trace`, `compare` and `race`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.lab.cluster import Unfit
from gradtide.lab.workloads.workload import Workload, evaluating

USAGE = (
    "write a function without arguments that returns (model, optimizer, loss) or "
    "(model, optimizer, loss, evaluate), where loss() computes the loss of one batch "
    "and evaluate() a held-out one, and name it as package.module:function"
)


@dataclass(frozen=True)
class Made:
    """What the user's function returned; `loss` raises for what is no loss."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[], Tensor]
    evaluate: Callable[[], float] | None = None


def is_own(name: str) -> bool:
    """Whether it is a function of the user's, `package.module:function`."""
    return ":" in name and not name.startswith("replay:")


def factory(path: str) -> Callable[[], Any]:
    """The function that was named; ValueError where there is none."""
    name, _, attribute = path.partition(":")
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
            f"there is no module {missing} here ({path}): start gradtide in the "
            "folder that holds it, or install it"
        ) from None
    found: Callable[[], Any] | None = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(f"{name} has no function {attribute!r}: {USAGE}")
    return found


def check(path: str) -> None:
    """Raise ValueError where no function is called so, before ranks call it."""
    before = list(sys.path)
    try:
        factory(path)
    finally:
        sys.path[:] = before  # ranks would look in the current folder first


def make(path: str) -> Made:
    """What the function makes; ValueError says what it has to be."""
    function = factory(path)
    try:
        made = function()
    except Exception as error:  # the user's may raise anything
        raise Unfit(
            f"{path} raised {_said(error)}: call it in Python to see where"
        ) from error
    if not isinstance(made, Sequence) or len(made) not in (3, 4):
        raise Unfit(f"{path} returned {_kind(made)}: {USAGE}")
    model, optimizer, loss, evaluate = (*made, None)[:4]
    if not isinstance(model, nn.Module):
        raise Unfit(f"{path}: the model is {_kind(model)}: {USAGE}")
    if not isinstance(optimizer, Optimizer):
        raise Unfit(f"{path}: the optimizer is {_kind(optimizer)}: {USAGE}")
    if not callable(loss):
        raise Unfit(f"{path}: loss is {_kind(loss)}, no function: {USAGE}")
    if evaluate is None:
        return Made(model, optimizer, lambda: _checked(path, loss()))
    if not callable(evaluate):
        raise Unfit(f"{path}: evaluate is {_kind(evaluate)}, no function: {USAGE}")
    return Made(
        *(model, optimizer, lambda: _checked(path, loss())),
        lambda: _number(path, evaluate()),
    )


def build(path: str, rank: int, size: int, seed: int) -> Workload:
    """The workload as this rank sees it.

    Whatever draws random numbers draws others on every rank, and the same for every
    contestant.
    """
    own = seed * size + rank
    torch.manual_seed(own)
    np.random.seed(own % 2**32)
    random.seed(own)
    made = make(path)

    def loss(module: nn.Module, batch: object) -> Tensor:
        with called_through(made.model, module):
            return made.loss()

    def score(module: nn.Module) -> dict[str, float]:
        assert made.evaluate is not None
        with evaluating(made.model):
            return {"loss": made.evaluate()}

    return Workload(
        name=path,
        model=made.model,
        optimizer=made.optimizer,
        batch=lambda step: (torch.empty(0), torch.empty(0)),  # loss() has its own
        loss=loss,
        evaluate=score if made.evaluate is not None else None,
    )


@contextmanager
def called_through(model: nn.Module, wrapper: nn.Module) -> Iterator[None]:
    """Inside, who calls the model calls its wrapper: the user's loss knows no other."""
    if wrapper is model:
        yield
        return
    forward, inside = model.forward, False

    def redirected(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return forward(*args, **kwargs)
        inside = True
        try:
            return wrapper(*args, **kwargs)
        finally:
            inside = False

    own = vars(model).get("forward")
    model.forward = redirected
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _checked(path: str, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise Unfit(
            f"{path}: loss() returned {_kind(loss)}: return a tensor of one element "
            "that was computed by the model, without no_grad()"
        )
    return loss


def _number(path: str, loss: Any) -> float:
    one = isinstance(loss, Tensor) and loss.numel() == 1
    if not one and not isinstance(loss, int | float):
        raise Unfit(
            f"{path}: evaluate() returned {_kind(loss)}: return the held-out loss, a "
            "number"
        )
    return float(loss)


def _said(error: BaseException) -> str:
    """An error's class, and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
