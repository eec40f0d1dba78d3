"""What schedules have to know of an optimizer, found by trying out a small copy of it.

`probe` finds how its steps follow from gradients, for schedules that exchange steps;
`check_deferrable` whether they can be made later, and for one parameter at a time. Both
know optimizers by what they do and not by name, see [Note: twin] in `optimizer_copy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradtide.runtime.optimizer.deferred_step import DeferredStep, own_step
from gradtide.runtime.optimizer.optimizer_copy import OptimizerCopy, aside

SCALE = 16.0  # a power of two: what is proportional is so to the bit
STEPS = 12  # RAdam's first five are proportional to gradients; some count to ten
LARGE = 2.0**20  # gradients: far above any `eps`
TURNED = -(2.0**-6)  # times them is the last gradient: no mean of them turns with it
SLOW = 2.0**-10  # times the learning rate: what moves far then is put back
FAR = 0.01  # of the way, for that; weight decay moves less
DECAY = 0.75  # of the learning rate after every step, as a scheduler does

# What is no memory of a copy's own.
# What torch's fused optimizers note of a check at their first step: no state.
CHECKS = {"_need_device_dtype_check_for_fused"}
OPAQUE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)

# Of a tensor the last step but one, the last, and what is remembered of it.
Tried: TypeAlias = tuple[Tensor, Tensor, Mapping[str, Tensor]]


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

    Raises ValueError, naming the optimizer, where it cannot be tried out; where steps
    are neither as long for larger gradients nor proportional to them; or where it
    remembers where parameters were.
    """
    with _refusing(optimizer, "exchanged", "exchanges gradients"):
        trials = [_tried(optimizer, scale) for scale in (1.0, SCALE, -1.0)]
        found = [_traits(*of_one) for of_one in zip(*trials, strict=True)]
        _check_position(optimizer)
        twin = OptimizerCopy(optimizer)
    traits = dict(zip(twin.trainable, found, strict=True))
    return {p: traits.get(own, Traits()) for p, own in twin.stands_for.items()}


def check_deferrable(optimizer: Optimizer) -> None:
    """Raise ValueError where steps cannot be made later, one parameter at a time.

    One small copy steps for all parameters at once, another as deferred updates do. In
    the end both have to have the same bits, in parameters and in all they remember. The
    optimizer and the random state stay as they are.
    """
    with _refusing(optimizer, "deferred", "updates at step()"):
        whole, parts = _filled(optimizer), _filled(optimizer)
        for step in range(STEPS):
            for twin in (whole, parts):
                twin.give([_pattern(p, step + i) for i, p in enumerate(twin.trainable)])
            whole.step()
            whole.scale_lr(DECAY)
            _step_in_parts(parts, backwards=step % 2 == 1)
        ours, theirs = _remembered(whole), _remembered(parts)
        for name in {**ours, **theirs}:
            if not _alike(ours.get(name), theirs.get(name)):
                raise ValueError(
                    f"made later and for one parameter at a time, they leave {name} "
                    "otherwise"
                )


@contextmanager
def _refusing(optimizer: Optimizer, what: str, remedy: str) -> Iterator[None]:
    """Name the optimizer, whatever goes wrong: it may raise anything."""
    try:
        with aside(optimizer):
            yield
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(
            f"the steps of {type(optimizer).__name__} cannot be {what}: use a schedule "
            f"that {remedy}, such as 'wfbp' (as a small copy of it steps: "
            f"{kind}{error})"
        ) from error


# - How steps follow from gradients ----------------------------------------------------


def _tried(optimizer: Optimizer, scale: float) -> list[Tried]:
    """What the steps of a copy do, each of them from zero."""
    twin = OptimizerCopy(optimizer, torch.float32)
    moves = [
        _moves(twin, LARGE * scale * factor, 0.0)
        for factor in [*[1.0] * (STEPS - 1), TURNED]
    ]
    memory = [
        {
            name: entry
            for name, entry in twin.optimizer.state.get(p, {}).items()
            if isinstance(entry, Tensor) and entry.is_floating_point()
        }
        for p in twin.trainable
    ]
    return list(zip(moves[-2], moves[-1], memory, strict=True))


def _moves(twin: OptimizerCopy, scale: float, start: float) -> list[Tensor]:
    """What a step changes in tensors that are set to `start`."""
    with torch.no_grad():
        for p in twin.trainable:
            p.fill_(start)
    grads = []
    for p in twin.trainable:
        place = torch.arange(p.numel(), device=p.device, dtype=torch.int64)
        # Large and small ones, up and down.
        values = 0.5 ** (place % 7) * (1 - 2 * (place % 3 % 2))
        grads.append((scale * values).view(p.shape))
    twin.give(grads)
    twin.step()
    return [p.detach() - start for p in twin.trainable]


def _traits(one: Tried, scaled: Tried, negated: Tried) -> Traits:
    step, last, state = one
    alike = _close(scaled[0], step)
    if not step.any() or not (alike or _close(scaled[0], SCALE * step)):
        raise ValueError(
            "they are neither as long for larger gradients nor proportional"
        )

    def entries(even: bool, power: int) -> list[str]:
        """The state's entries that are even or odd, and scale with the gradients."""
        sign, factor = 1 if even else -1, SCALE**power
        return [
            name
            for name, entry in state.items()
            if entry.any()
            and _close(negated[2][name], sign * entry)
            and _close(scaled[2][name], factor * entry)
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


def _check_position(optimizer: Optimizer) -> None:
    """Raise ValueError where steps depend on where parameters were before.

    Two copies step from the same place every other time, and from opposite ones in
    between. So slow, what weight decay remembers hardly counts.
    """
    steady, swaying = (
        OptimizerCopy(optimizer, torch.float32),
        OptimizerCopy(optimizer, torch.float32),
    )
    for twin in (steady, swaying):
        twin.scale_lr(SLOW)
    for step in range(STEPS):
        moves = _moves(steady, 1.0, 1.0)
        others = _moves(swaying, 1.0, 1.0 if step % 2 else -1.0)
        if step % 2 and any(
            bool(((move - other).abs() > FAR).any())
            for move, other in zip(moves, others, strict=True)
        ):
            raise ValueError(
                "they go back to where parameters were, not to where all ranks are"
            )


def _close(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x.float(), y.float(), rtol=0.02, atol=0.0)


# - Whether steps can be deferred ------------------------------------------------------


def _filled(optimizer: Optimizer) -> OptimizerCopy:
    twin = OptimizerCopy(optimizer)
    with torch.no_grad():
        for i, p in enumerate(twin.params):
            p.copy_(_pattern(p, i))
    return twin


def _pattern(like: Tensor, turn: int) -> Tensor:
    """Numbers that differ from one `turn` to the next, and none of which is zero."""
    place = torch.arange(like.numel(), device=like.device, dtype=torch.int64)
    return ((place * 7 + turn * 5) % 11 - 4.5).view(like.shape) / 8


def _step_in_parts(twin: OptimizerCopy, backwards: bool) -> None:
    """Step as a deferred update does: when step() is over, and the rate another."""
    optimizer, grads = twin.optimizer, [p.grad for p in twin.trainable]
    noted = DeferredStep(optimizer)
    for p in twin.trainable:
        p.grad = None
    own_step(type(optimizer))(optimizer)
    twin.scale_lr(DECAY)
    parts = list(zip(twin.trainable, grads, strict=True))
    with torch.no_grad():
        for p, grad in reversed(parts) if backwards else parts:
            p.grad = grad
            noted.apply([p], momentum=True)
            p.grad = None


def _remembered(twin: OptimizerCopy) -> dict[str, Any]:
    """All numbers of a copy by name: its tensors', its groups', its attributes'."""
    names: dict[int, str] = {id(p): f"[{i}]" for i, p in enumerate(twin.params)}
    found: dict[str, Any] = {f"parameter {i}": p for i, p in enumerate(twin.params)}
    seen = set(names)

    def look(name: str, value: Any) -> None:
        if isinstance(value, Tensor | int | float | complex | str | None):
            found[name] = names.get(id(value), value)
        elif id(value) not in seen and not isinstance(value, OPAQUE):
            seen.add(id(value))
            if isinstance(value, Mapping):
                for key, one in value.items():
                    look(name + names.get(id(key), f".{key}"), one)
            elif isinstance(value, Sequence | set):
                for i, one in enumerate(value):
                    look(f"{name}[{i}]", one)
            else:
                for key, one in getattr(value, "__dict__", {}).items():
                    if key not in CHECKS:
                        look(f"{name}.{key}", one)

    look(type(twin.optimizer).__name__, twin.optimizer)
    return found


def _alike(x: Any, y: Any) -> bool:
    """Whether two numbers or tensors have the same bits."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and (x == y or (x != x and y != y))
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if hasattr(x, "__tensor_flatten__"):  # as where values are quantised
        names, _ = x.__tensor_flatten__()
        return all(_alike(getattr(x, name), getattr(y, name)) for name in names)
    return torch.equal(x, y) or torch.allclose(x, y, rtol=0.0, atol=0.0, equal_nan=True)
