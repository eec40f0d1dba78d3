"""An optimizer step that is carried out bucket by bucket, later."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradtide.momentum import without


class DeferredStep:
    """What `optimizer.step()` would do now, to be applied to some parameters at a time.

    Hyper-parameters are those of the moment of construction: LR schedulers run between
    `step()` and the update. The optimizer's state is shared, not copied. Right for
    every optimizer that treats parameters one by one (all of torch.optim but LBFGS).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind = type(optimizer)
        # A shallow view: it shares the optimizer's state, but not its groups and hooks.
        self._view = copy.copy(optimizer)
        self._view.__dict__.pop("step", None)  # LR schedulers bind it to the original
        self._view._optimizer_step_pre_hooks = OrderedDict()
        self._view._optimizer_step_post_hooks = OrderedDict()
        self._groups = [_captured(group) for group in optimizer.param_groups]
        self._group_of = {
            id(p): i for i, group in enumerate(self._groups) for p in group["params"]
        }

    def apply(self, params: Iterable[Tensor], momentum: bool = True) -> None:
        """Step for exactly these parameters, from their `.grad`.

        Without `momentum` if that is in the gradients already.
        """
        own: dict[int, list[Tensor]] = {}
        for p in params:
            own.setdefault(self._group_of[id(p)], []).append(p)
        self._view.param_groups = [
            {**group, **({} if momentum else without(group)), "params": members}
            for group, members in ((self._groups[i], own[i]) for i in sorted(own))
        ]
        self._kind.step(self._view)


def _captured(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters; tensors cloned: schedulers change them in place."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
    }


def closes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether step() was given a closure; `args` of a hook begin with the optimizer."""
    return any(a is not None for a in (*args[1:], kwargs.get("closure")))
