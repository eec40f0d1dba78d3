"""Whether a training loop would gain by deferred updates; found out by looking on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.core.torch_internals.autograd import Hook, after_backward, before_backward
from gradtide.runtime.optimizer.deferred_step import closes

SAMPLE = 64  # entries of each gradient by which scaling is told from other edits
CLOSE = 0.02  # relative: two roundings to bf16
TINY = 1e-4  # of the largest entry: roundings to zero in fp16

# A gradient at the end of backward, how often it was written to, some of its entries.
Noted: TypeAlias = tuple[Tensor | None, int, Tensor | None]


class LoopInspector:
    """Whether the user's loop does with gradients what deferred updates do not bear.

    Under them gradients are still on their way between backward and step(). They can be
    cleared and scaled there, as by clipping and by a GradScaler; whatever else is done
    has them delivered, and nothing is gained. A closure is called before the step, so
    it is no obstacle either; an optimizer that calls it again is refused by itself.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._noted: list[Noted] | None = None
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
        self._noted = [_note(p.grad) for p in self._params]

    def _after_forward(self, output: Any) -> None:
        # Behind the replica's own end of backward, which is queued twice as well.
        late = lambda: after_backward(self.note)  # noqa: E731
        before_backward(output, lambda: after_backward(late))

    def _check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        noted, self._noted = self._noted, None
        if closes(args, kwargs):  # its backward is still to come
            return
        if noted is None:
            self.obstacle = "step() comes without a backward through the model before"
        elif not all(
            _scaled(p.grad, was) for p, was in zip(self._params, noted, strict=True)
        ):
            self.obstacle = "gradients are edited between backward and step()"


def _note(grad: Tensor | None) -> Noted:
    return (None, 0, None) if grad is None else (grad, grad._version, _sample(grad))


def _sample(grad: Tensor) -> Tensor:
    flat = grad.detach().reshape(-1)
    return flat[:: max(len(flat) // SAMPLE, 1)].clone()


@torch.no_grad()
def _scaled(grad: Tensor | None, noted: Noted) -> bool:
    """Whether nothing was done to a gradient but to clear it, or to scale it."""
    before, version, old = noted
    if grad is None or (grad is before and grad._version == version):
        return True
    if grad is not before or old is None or not len(old):
        return False
    new, largest = _sample(grad), int(old.abs().argmax())
    if not old[largest].isfinite() or not old[largest]:
        return True  # nobody can tell by what it was scaled
    factor = new[largest] / old[largest]
    tiny = TINY * float(new.abs().max())
    return torch.allclose(new, factor * old, rtol=CLOSE, atol=tiny)
