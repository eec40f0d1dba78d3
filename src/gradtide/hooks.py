"""The hooks on the user's module and optimizer, which tell `training` of a step.

Copies of the module have none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradtide.autograd import Hook, before_backward, in_backward
from gradtide.broadcast import broadcast
from gradtide.deferred import closes
from gradtide.step import Stage
from gradtide.training import Training


class Hooks:
    """Hooks for every schedule, and those through which parameters change.

    With `buffers` every training forward begins with rank 0's. `stepped` is called
    after each of the optimizer's steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        training: Training,
        buffers: bool,
        stepped: Callable[[], None],
    ) -> None:
        self._model, self._optimizer, self._training = model, optimizer, training
        # Whose buffers to send; to look for them anew in every forward takes longer.
        self._buffered = [
            module
            for module in model.modules()
            if buffers and any(True for _ in module.buffers(False))
        ]
        self._handles: list[Any] = []
        self._update_handles: list[Any] = []  # of what depends on the schedule
        keep = self._handles.append
        for p in training.placement.places:
            hook = training.gradient_hook(p)
            keep(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        keep(model.register_forward_pre_hook(Hook(lambda *_: self._before_forward())))
        # A gradient hook alone could not tell the backward's end from that of a nested
        # one (re-entrant activation checkpointing runs backwards inside backward).
        begin = training.begin
        keep(
            model.register_forward_hook(Hook(lambda *a: before_backward(a[-1], begin)))
        )
        keep(optimizer.register_step_pre_hook(lambda *a: self._stepping(*a)))
        keep(optimizer.register_step_post_hook(lambda *_: training.stepped()))
        keep(optimizer.register_step_post_hook(lambda *_: stepped()))

    def follow(self) -> None:
        """Have parameters change in the forward, or at step(), as the schedule says."""
        for handle in self._update_handles:
            handle.remove()
        training, self._update_handles = self._training, []
        keep = self._update_handles.append
        if training.step.schedule.update != "forward":
            return

        def flush(*_: Any) -> None:
            training.flush()

        keep(self._optimizer.register_state_dict_pre_hook(flush))
        keep(self._optimizer.register_load_state_dict_pre_hook(flush))
        watch = training.updates.watch(self._model, training.before_read)
        self._update_handles += watch
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
        places = self._training.placement.places
        for name, p in module.named_parameters(recurse=False):
            if p in places and places[p].bucket.stage is Stage.DUE:
                raise RuntimeError(
                    f"the model is copied or saved while the update of {name} is "
                    "deferred: call sync.flush() before"
                )
        self._training.flush()

    def _before_forward(self) -> None:
        training = self._training
        if training.step.open and not in_backward():
            raise RuntimeError(
                "the last backward pass raised before its end, so the ranks may have "
                "sent different gradients: end the run, or call sync.remove() on every "
                "rank and replicate() again"
            )
        if training.quiet or not (self._model.training and torch.is_grad_enabled()):
            return
        if training.second is not None:
            training.step.forward()
        if self._buffered:
            own = [buffer for m in self._buffered for buffer in m.buffers(False)]
            broadcast(training.engine, own)

    def _stepping(self, _: Optimizer, args: Any, kwargs: Any) -> None:
        refusal = self._training.refuses_closures
        if refusal is not None and closes(args, kwargs):
            raise RuntimeError(refusal)
        self._training.stepping()
