"""The running averages of factors, packed, in fp32.

An average lives where its factor is inverted. It is kept packed: half the memory, half
the pass over it, and half the checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtide.kfac.layers import Kind, Layer
from gradtide.kfac.packing import traces, unpack


class RunningFactor:
    """The exponential average of one factor of one layer.

    `value`: flat fp32 of `layer.numel(kind)` elements, the state to be saved; None
    before the first update. The first update is the average: nothing is biased to zero
    or to the identity.
    """

    def __init__(self, layer: Layer, kind: Kind) -> None:
        self.layer, self.kind = layer, kind
        self.value: Tensor | None = None

    def update(self, new: Tensor, decay: float) -> bool:
        """value = decay * value + (1 - decay) * new, of packed factors.

        `new` is not kept. A factor with an infinity or a NaN (a GradScaler that tries
        a scale) is refused, and False returned: the square of what is not finite is on
        the diagonal, so that the trace tells.
        """
        if not torch.isfinite(self._traces(new)).all():
            return False
        if self.value is None:
            self.value = new.float().clone()
        else:
            self.value.lerp_(new.float(), 1 - decay)
        return True

    def traces(self) -> Tensor:
        """The traces [groups] of the average; zeros before the first update."""
        if self.value is None:
            return torch.zeros(self.layer.groups, device=self.layer.weight.device)
        return self._traces(self.value)

    def full(self, out: Tensor | None = None) -> Tensor:
        """The average as symmetric fp32 [groups, d, d]."""
        assert self.value is not None
        shape = self.layer.shape(self.kind)
        out = self.value.new_empty(shape) if out is None else out
        return unpack(self.value, out)

    def _traces(self, packed: Tensor) -> Tensor:
        return traces(packed, self.layer.groups, self.layer.dim(self.kind))
