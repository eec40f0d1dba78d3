"""Whether a training loop would bear deferred updates; found out by looking on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.core.autograd import Hook, after_backward, before_backward
from gradtide.runtime.deferred_step import closes


class LoopInspector:
    """Whether the user's loop does with gradients what deferred updates do not allow.

    Under them there are no gradients between backward and step: whoever changes them
    there, or evaluates the model inside of step(), needs an ordinary schedule.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._noted: list[tuple[Tensor | None, int]] | None = None
        self.obstacle = ""
        # Hooks on the model's output are called in turn: when this one's callback runs,
        # at the end of backward, the replica has put the means in place.
        self._handles: list[Any] = [
            model.register_forward_hook(Hook(lambda *a: self._after_forward(a[-1]))),
            optimizer.register_step_pre_hook(lambda *a: self._check(a[1], a[2])),
        ]

    def remove(self) -> None:
        """Look no longer, and hold no gradients."""
        self._params, self._noted = [], None
        for handle in self._handles:
            handle.remove()

    def note(self) -> None:
        """All that was done to gradients up to now is allowed."""
        grads = [p.grad for p in self._params]
        self._noted = [(g, 0 if g is None else g._version) for g in grads]

    def _after_forward(self, output: Any) -> None:
        # Behind the replica's own end of backward, which is queued twice as well.
        late = lambda: after_backward(self.note)  # noqa: E731
        before_backward(output, lambda: after_backward(late))

    def _check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        noted, self._noted = self._noted, None
        if closes(args, kwargs):
            self.obstacle = "step() is called with a closure"
        elif noted is None or any(
            p.grad is not grad or (grad is not None and grad._version != version)
            for p, (grad, version) in zip(self._params, noted, strict=True)
        ):
            self.obstacle = "gradients are changed between backward and step()"
