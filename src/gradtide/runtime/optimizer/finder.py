"""Optimizers that were not passed, found when they step.

Scripts for DistributedDataParallel build the optimizer after it, and tell nobody. torch
calls global hooks around every optimizer's step, so the first step of one that holds
the model's parameters makes it known. A global hook lasts as long as the process: it
must not keep the model.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradtide.core.torch_internals.compilation import untraced


class Finder:
    """Tells of the steps of every optimizer that holds any of some parameters.

    The method `begins` is called before a step, with the optimizer and the step's
    arguments; it may return others. `ends` is called after it, with the optimizer.
    What an optimizer steps inside its own step is not told of.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        begins: Callable[[Optimizer, Any, Any], Any],
        ends: Callable[[Optimizer], None],
    ) -> None:
        self._params = {id(p) for p in params}
        self._begins, self._ends = weakref.WeakMethod(begins), weakref.WeakMethod(ends)
        self._outer: weakref.ref[Optimizer] | None = None  # whose step is under way
        if self._params:
            # No part of a step that is compiled.
            register_optimizer_step_pre_hook(untraced(self._before))
            register_optimizer_step_post_hook(untraced(self._after))

    def follow(self, params: Iterable[Tensor]) -> None:
        """Look for other parameters from now on, if it has looked for any."""
        if self._params:
            self._params = {id(p) for p in params}

    def known(self) -> list[Optimizer]:
        """Those that there are already, whether they have stepped or not; slow."""
        return [o for o in existing() if self._holds(o)]

    def rest(self) -> None:
        """Look no longer, at any moment: hooks that do nothing stay behind."""
        self._params.clear()

    def _holds(self, optimizer: Optimizer) -> bool:
        params = (p for group in optimizer.param_groups for p in group["params"])
        return any(id(p) in self._params for p in params)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        begins = self._begins()
        if begins is None or not self._holds(optimizer):
            return None
        outer = None if self._outer is None else self._outer()
        if outer is not None and outer is not optimizer:
            return None
        self._outer = weakref.ref(optimizer)  # it is, already, if its last step raised
        return begins(optimizer, args, kwargs)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        ends, outer = self._ends(), self._outer
        if ends is not None and outer is not None and outer() is optimizer:
            self._outer = None
            ends(optimizer)


def existing() -> list[Optimizer]:
    """All optimizers of this process; slow."""
    return [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
