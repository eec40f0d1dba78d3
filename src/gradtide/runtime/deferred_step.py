"""What an optimizer's step() would do, to be done later and for some parameters.

Knows optimizers; nothing of buckets, modules, or of when anything happens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradtide.runtime.momentum import without


class DeferredStep:
    """What `optimizer.step()` would do now, to be applied to some parameters at a time.

    Hyper-parameters and attributes are those of the moment of construction: LR
    schedulers run between `step()` and the update, and `step()` may count steps. The
    optimizer's state is shared, not copied. An optimizer that this one holds is seen
    in the same way. This is right for every optimizer that treats parameters one by
    one (all of torch.optim but LBFGS).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind = type(optimizer)
        self._attributes = dict(vars(optimizer))
        self._attributes.pop("step", None)  # LR schedulers bind it to the original
        for name, value in self._attributes.items():
            if isinstance(value, Optimizer):
                self._attributes[name] = DeferredStep(value)
        # Tensors are cloned: schedulers change them in place.
        self._groups: list[dict[str, Any]] = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            for group in optimizer.param_groups
        ]
        self._group_of = {
            id(p): i for i, group in enumerate(self._groups) for p in group["params"]
        }

    def apply(self, params: Sequence[Tensor], momentum: bool) -> None:
        """Step for exactly these parameters, from their `.grad`.

        The step has no `momentum` where that is in the gradients already.
        """
        own_step(self._kind)(self._view(params, momentum))

    def _view(self, params: Sequence[Tensor], momentum: bool) -> Optimizer:
        """The optimizer, as it was, of these parameters; it shares the state."""
        view: Optimizer = object.__new__(self._kind)
        view.__dict__ = {
            name: value._view(params, momentum)
            if isinstance(value, DeferredStep)
            else value
            for name, value in self._attributes.items()
        }
        view._optimizer_step_pre_hooks = OrderedDict()
        view._optimizer_step_post_hooks = OrderedDict()
        own: dict[int, list[Tensor]] = {}
        for p in params:
            if id(p) in self._group_of:
                own.setdefault(self._group_of[id(p)], []).append(p)
        view.param_groups = [
            {**group, **({} if momentum else without(group)), "params": members}
            for group, members in ((self._groups[i], own[i]) for i in sorted(own))
        ]
        return view


def own_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """What step() does, without torch's global hooks: they run once a step()."""
    step: Callable[[Optimizer], Any] = kind.step
    hooked = getattr(step, "hooked", False)
    return step.__wrapped__ if hooked else step  # type: ignore[attr-defined]


def closes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether step() was given a closure; `args` of a hook begin with the optimizer."""
    return any(a is not None for a in (*args[1:], kwargs.get("closure")))
