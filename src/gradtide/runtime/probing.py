"""How an optimizer's steps follow from gradients, found by trying it out.

Knows optimizers by what they do and not by name: a new one of the same class, with a
group's hyper-parameters, steps for a small tensor that nobody else has, from gradients,
from SCALE times as large ones and from their opposites.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.runtime.deferred_step import own_step

SIDE = 3  # of the tensor that is tried out
SCALE = 16.0  # a power of two: what is proportional is so to the bit
STEPS = 12  # RAdam's first five are proportional to gradients
LARGE = 2.0**20  # gradients: far above any `eps`
TURNED = -(2.0**-6)  # times them is the last gradient: no mean of them turns with it


@dataclass(frozen=True)
class Traits:
    """How steps depend on gradients; entries of the optimizer's state by their names.

    `divides`: steps are as long for larger gradients, as the optimizer remembers how
    large they are. `squares`: what it remembers of squares of gradients. `mean`: the
    mean of gradients along which it goes down in steps that are as long for all.
    """

    divides: bool = False
    squares: tuple[str, ...] = ()
    mean: str | None = None


def probe(optimizer: Optimizer) -> dict[Tensor, Traits]:
    """The traits by parameter; the optimizer and the random state stay as they are.

    Each kind of group is tried out with tensors of as many dimensions as it has.
    Raises ValueError, naming the optimizer, where that fails, or where steps are
    neither as long for larger gradients nor proportional to them.
    """
    found: dict[Tensor, Traits] = {}
    kinds: dict[tuple[str, int, torch.device], Traits] = {}
    for group in optimizer.param_groups:
        # Groups often differ in nothing but this.
        own = {k: v for k, v in group.items() if k not in ("lr", "initial_lr")}
        text = repr({k: v for k, v in own.items() if not k.startswith("param")})
        for p in group["params"]:
            kind = text, p.dim(), p.device
            if kind not in kinds:
                kinds[kind] = _traits(type(optimizer), group, p)
            found[p] = kinds[kind]
    return found


def _traits(kind: type[Optimizer], group: Mapping[str, Any], like: Tensor) -> Traits:
    (*_, step, last), state = _tried(kind, group, like, 1.0)
    (*_, scaled, _), scaled_state = _tried(kind, group, like, SCALE)
    _, negated_state = _tried(kind, group, like, -1.0)
    alike = _close(scaled, step)
    if not step.any() or not (alike or _close(scaled, SCALE * step)):
        raise _refusal(
            kind, "its steps are neither as long for larger gradients nor proportional"
        )

    def entries(even: bool, power: int) -> list[str]:
        """The state's entries that are even or odd, and scale with the gradients."""
        sign, factor = 1 if even else -1, SCALE**power
        return [
            name
            for name, entry in state.items()
            if entry.any()
            and _close(negated_state[name], sign * entry)
            and _close(scaled_state[name], factor * entry)
        ]

    def descends(entry: Tensor) -> bool:
        """Whether it is everywhere opposite to the last step."""
        alike = entry.shape == last.shape
        return alike and bool((entry.sign() * last.sign() < 0).all())

    squares = tuple(entries(even=True, power=2))
    sizes = [*squares, *entries(even=True, power=1)]
    means = [name for name in entries(even=False, power=1) if descends(state[name])]
    # With a mean of steps it goes by that.
    if not alike or entries(even=False, power=0):
        means = []
    return Traits(alike and bool(sizes), squares, next(iter(means), None))


def _tried(
    kind: type[Optimizer], group: Mapping[str, Any], like: Tensor, scale: float
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The steps of a new optimizer, and what it then remembers.

    Its tensor, of as many dimensions as `like`, is set to zero before each.
    """
    device = like.device
    p = nn.Parameter(torch.zeros((SIDE,) * like.dim(), device=device))
    place = torch.arange(p.numel(), device=device)
    # Large and small ones, up and down.
    values = 0.5 ** (place % 7) * (1 - 2 * (place % 3 % 2))
    grad = (LARGE * scale * values).view(p.shape)
    moves = []
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            optimizer, step = _new(kind, group, p), own_step(kind)
            for factor in [*[1.0] * (STEPS - 1), TURNED]:
                p.grad = factor * grad
                with torch.no_grad():
                    p.zero_()
                step(optimizer)
                moves.append(p.detach().clone())
    except Exception as error:  # an optimizer of the user's may raise anything
        raise _refusal(kind, f"{type(error).__name__}: {error}") from error
    return moves, {
        name: entry
        for name, entry in optimizer.state[p].items()
        if isinstance(entry, Tensor) and entry.is_floating_point()
    }


def _new(
    kind: Callable[..., Optimizer], group: Mapping[str, Any], p: Tensor
) -> Optimizer:
    """An optimizer of one parameter, with the hyper-parameters of a group."""
    own = copy.deepcopy({k: v for k, v in group.items() if not k.startswith("param")})
    if "lr" in own and not own["lr"]:  # as many schedulers begin
        own["lr"] = own["lr"] + 1e-3
    arguments = inspect.signature(kind).parameters
    given = {name: value for name, value in own.items() if name in arguments}
    return kind([{**own, "params": [p]}], **given)


def _close(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x.float(), y.float(), rtol=0.02, atol=0.0)


def _refusal(kind: type[Optimizer], why: str) -> ValueError:
    return ValueError(
        f"the steps of {kind.__name__} cannot be exchanged, for on a small tensor of "
        f"its own it cannot be tried out ({why}): use a schedule that exchanges "
        "gradients, such as 'wfbp'"
    )
