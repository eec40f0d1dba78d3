"""What an optimizer's step() would do, to be done later and for some parameters.

Of some optimizers a step is divided: one rank computes it for each parameter. They say
so by being `Divides`.

Knows optimizers; nothing of buckets, modules, or of when anything happens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradtide.core.torch_internals import forget_step_hooks
from gradtide.runtime.optimizer.momentum import without
from gradtide.wire import Wire


@runtime_checkable
class Divides(Protocol):
    """What such an optimizer offers, so that its step can be deferred.

    Attributes:
        answer_dtype, wire: That of what an owner has computed, and how that travels.
        deferred: Its steps are made for it, by the methods below: `step` does nothing.
    """

    answer_dtype: torch.dtype
    wire: Wire
    deferred: bool

    def owners(self) -> Mapping[Tensor, int]:
        """The rank that owns each parameter; collective where any has none yet."""

    def answers(self, params: Iterable[Tensor]) -> Mapping[Tensor, Tensor]:
        """What the step would do to this rank's, by their `.grad`, as one tensor each.

        Of parameters that it does not hold nothing is said. Local.
        """

    def take(self, answers: Mapping[Tensor, Tensor]) -> None:
        """Make the step for some parameters, by answers of their owners. Local."""

    def alone(self) -> Optimizer:
        """One that does the same without other ranks, with the same groups."""


@dataclass(frozen=True)
class Owned:
    """The owners of parameters, the dtype of their answers, and how these travel."""

    owners: Mapping[Tensor, int]
    dtype: torch.dtype
    wire: Wire


class DeferredStep:
    """What `optimizer.step()` would do now, to be applied to some parameters at a time.

    Hyper-parameters and attributes are those of the moment of construction: LR
    schedulers run between `step()` and the update, and `step()` may count steps. The
    optimizer's state is shared, not copied. An optimizer that this one holds is seen
    in the same way. `runtime.optimizer.probing` finds out for which optimizers this
    does what step() does.

    Who edits the state meanwhile edits it before the update and not after it, as it
    would be without deferring: from `mark` on that is refused.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind = type(optimizer)
        self._attributes = dict(vars(optimizer))
        self._attributes.pop("step", None)  # LR schedulers bind it to the original
        held = ((k, v) for k, v in self._attributes.items() if _held_in(v))
        self._held = {name: _each(value, DeferredStep) for name, value in held}
        own = (vars(one).get("state") for one in (optimizer, *holds(optimizer)))
        self._states = [state for state in own if isinstance(state, dict)]
        self._others: Set[int] = frozenset()
        self._marks: list[int] | None = None
        # Tensors are cloned: schedulers change them in place.
        self._groups: list[dict[str, Any]] = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            for group in optimizer.param_groups
        ]
        # Twice of a parameter that is twice in its group: torch steps it twice, too.
        self._groups_of: dict[int, list[int]] = {}
        for i, group in enumerate(self._groups):
            for p in group["params"]:
                self._groups_of.setdefault(id(p), []).append(i)

    def mark(self, params: Set[int]) -> None:
        """The state of parameters is to stay as it is, until this is applied (hot).

        They are named by their ids. Of others the optimizer may be told by somebody
        else, as by another replica.
        """
        self._others = self._groups_of.keys() - params
        self._marks = self._versions()

    def _versions(self) -> list[int]:
        """How often each tensor of the state was changed (hot)."""
        try:
            return [
                value._version
                for state in self._states
                for p, own in state.items()
                if own.__class__ is dict
                and not (self._others and id(p) in self._others)
                for value in own.values()
                if value.__class__ is Tensor
            ]
        except RuntimeError:  # of a tensor made in inference mode nobody knows
            return []

    def _refuse_edits(self) -> None:
        marks, self._marks = self._marks, None
        if marks is not None and marks != self._versions():
            raise RuntimeError(
                f"the state of {self._kind.__name__} was changed after step(), while "
                "the update that the scheme defers to the next forward was still to "
                "come: call sync.flush() (of a wrapper, ddp.replica.flush()) before "
                "you read or edit optimizer.state, or use 'wfbp'"
            )

    def apply(self, params: Sequence[Tensor], momentum: bool) -> None:
        """Step for exactly these parameters, from their `.grad`.

        The step has no `momentum` where that is in the gradients already. Raises
        RuntimeError if the state was changed since `mark`.
        """
        self._refuse_edits()
        own_step(self._kind)(self._view(params, momentum))

    def take(self, answers: Mapping[Tensor, Tensor]) -> None:
        """Step for these parameters, by what their owners have computed."""
        view, left = self._view([*answers], momentum=True), dict(answers)
        for one in (view, *holds(view)):  # some may be held twice
            take: Callable[[Mapping[Tensor, Tensor]], None] | None
            if take := getattr(one, "take", None):
                own = [p for group in one.param_groups for p in group["params"]]
                take({p: left.pop(p) for p in own if p in left})

    def _view(self, params: Sequence[Tensor], momentum: bool) -> Optimizer:
        """The optimizer, as it was, of these parameters; it shares the state."""
        view: Optimizer = object.__new__(self._kind)
        view.__dict__ = self._attributes | {
            name: _each(value, lambda held: held._inner_view(params, momentum))
            for name, value in self._held.items()
        }
        forget_step_hooks(view)
        own = defaultdict[int, list[Tensor]](list)
        for p in params:
            for i in self._groups_of.get(id(p), ()):
                own[i].append(p)
        view.param_groups = [
            {**group, **({} if momentum else without(group)), "params": members}
            for group, members in ((self._groups[i], own[i]) for i in sorted(own))
        ]
        return view

    def _inner_view(self, params: Sequence[Tensor], momentum: bool) -> Optimizer:
        """The view of an optimizer that is held: it is stepped by its own `step`."""
        view = self._view(params, momentum)
        view.__dict__["step"] = MethodType(own_step(self._kind), view)
        return view


def holds(owner: object) -> list[Optimizer]:
    """The optimizers among one's attributes: each alone, in a list or a dict."""
    found: list[Optimizer] = []
    for value in getattr(owner, "__dict__", {}).values():
        if _held_in(value):
            _each(value, found.append)
    return found


def dividing(optimizer: object) -> list[Divides]:
    """Those that divide their steps: an optimizer itself, or what it holds."""
    each = {id(one): one for one in (optimizer, *holds(optimizer))}.values()
    return [one for one in each if isinstance(one, Divides)]


def owned_by(optimizer: object, size: int) -> Owned | None:
    """Who owns what is stepped; None if nobody does. Collective, as `owners` is."""
    found = dividing(optimizer) if size > 1 else []
    if not found:
        return None
    owners = {p: rank for one in found for p, rank in one.owners().items()}
    (how, *others) = {(one.answer_dtype, one.wire) for one in found}
    if others:
        raise ValueError("optimizers that divide their steps: give all the same wire")
    return Owned(owners, *how)


def own_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """What step() does, without torch's global hooks: they run once a step()."""
    step: Callable[[Optimizer], Any] = kind.step
    hooked = getattr(step, "hooked", False)
    return step.__wrapped__ if hooked else step  # type: ignore[attr-defined]


def closes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether step() was given a closure; `args` of a hook begin with the optimizer."""
    return any(a is not None for a in (*args[1:], kwargs.get("closure")))


def _held_in(value: Any) -> bool:
    """Whether an attribute is an optimizer, or a container of optimizers."""
    if isinstance(value, dict):
        value = next(iter(value.values()), None)
    elif isinstance(value, list | tuple):
        value = value[0] if value else None
    return isinstance(value, Optimizer)


def _each(value: Any, call: Callable[[Any], Any]) -> Any:
    """The results of `call` for one or for all of a container, in one like it."""
    if isinstance(value, dict):
        return {key: call(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(call, value))
    return call(value)
