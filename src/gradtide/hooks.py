"""The hooks on the user's module and optimizer.

Copies of the module have none of them. What they set off is in `backward` and
`updates`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradtide.autograd import Hook, before_backward, in_backward
from gradtide.backward import Backward
from gradtide.broadcast import broadcast
from gradtide.deferred import closes
from gradtide.updates import Updates


class Hooks:
    """Hooks for every schedule, and those through which parameters change.

    With `buffers` every training forward begins with rank 0's. `stepped` is called
    after each of the optimizer's steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        backward: Backward,
        updates: Updates,
        buffers: bool,
        stepped: Callable[[], None],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._backward, self._updates = backward, updates
        # Whose buffers to send; to look for them anew in every forward takes longer.
        self._buffered = [
            module
            for module in model.modules()
            if buffers and any(True for _ in module.buffers(False))
        ]
        self._handles: list[Any] = []
        self._update_handles: list[Any] = []  # of what depends on the schedule
        keep = self._handles.append
        for p in updates.placement.homes:
            hook = backward.gradient_hook(p)
            keep(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        keep(model.register_forward_pre_hook(Hook(lambda *_: self._before_forward())))
        keep(model.register_forward_hook(Hook(lambda *a: self._after_forward(a[-1]))))
        keep(optimizer.register_step_post_hook(lambda *_: self._stepped()))
        keep(optimizer.register_step_post_hook(lambda *_: stepped()))

    def follow(self, in_forward: bool) -> None:
        """Have parameters change in the forward, or at step()."""
        for handle in self._update_handles:
            handle.remove()
        updates, self._update_handles = self._updates, []
        keep = self._update_handles.append
        if self._backward.steps is not None:
            keep(self._optimizer.register_step_pre_hook(lambda *a: self._going(*a)))
            return
        if not in_forward:
            keep(self._optimizer.register_step_pre_hook(lambda *a: self._stepping(*a)))
            return

        def flush(*_: Any) -> None:
            updates.flush()

        keep(self._optimizer.register_step_pre_hook(lambda *a: self._deferring(*a)))
        keep(self._optimizer.register_state_dict_pre_hook(flush))
        keep(self._optimizer.register_load_state_dict_pre_hook(flush))
        self._update_handles += updates.watch(self._model)
        for module in self._model.modules():
            hook = Hook(flush, partial(self._copied, module))
            keep(module.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
            keep(module.register_load_state_dict_pre_hook(Hook(flush)))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Leave module and optimizer as they were."""
        for handle in (*self._handles, *self._update_handles):
            handle.remove()
        self._handles, self._update_handles = [], []

    def _copied(self, module: nn.Module) -> None:
        """A copy of a module is made; its own parameters are in it already."""
        homes, due = self._updates.placement.homes, self._updates.due
        for name, p in module.named_parameters(recurse=False):
            if p in homes and homes[p].home in due:
                raise RuntimeError(
                    f"the model is copied or saved while the update of {name} is "
                    "deferred: call sync.flush() before"
                )
        self._updates.flush()

    def _before_forward(self) -> None:
        backward = self._backward
        if backward.open and not in_backward():
            raise RuntimeError(
                "the last backward pass raised before its end, so the ranks may have "
                "sent different gradients: end the run, or call sync.remove() on every "
                "rank and replicate() again"
            )
        if backward.quiet or not (self._model.training and torch.is_grad_enabled()):
            return
        if backward.second is not None:
            backward.forward()
        if self._buffered:
            own = [buffer for m in self._buffered for buffer in m.buffers(False)]
            broadcast(backward.engine, own)

    def _after_forward(self, output: Any) -> None:
        """Learn of the backward through the output before any gradient is produced.

        A gradient hook alone could not tell the backward's end from that of a nested
        one (re-entrant activation checkpointing runs backward passes inside backward).
        """
        before_backward(output, self._backward.begin)

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._backward.second is not None and closes(args, kwargs):
            raise RuntimeError(
                "step(closure) makes gradients inside the step, after K-FAC has "
                "preconditioned: call step() without a closure"
            )
        self._updates.stepping(optimizer)

    def _stepped(self) -> None:
        self._updates.stepped()
        steps = self._backward.steps
        if steps is not None and steps.on:
            steps.stepped()

    def _going(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if closes(args, kwargs):
            raise RuntimeError(
                "step(closure) evaluates the model as often as each rank likes, and "
                "every time all ranks have to: call step() without a closure, or use "
                "'wfbp'"
            )
        steps = self._backward.steps
        if steps is not None and steps.on:
            steps.stepping()
        else:
            self._updates.stepping(optimizer)

    def _deferring(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if closes(args, kwargs):
            raise RuntimeError(
                "step(closure) evaluates the model inside the step, which a deferred "
                "update cannot: call step() without a closure, or use 'wfbp'"
            )
        self._updates.defer(optimizer)
