"""Where to hook for the gradient of an output."""

from __future__ import annotations

from torch import Tensor


def hookable(output: Tensor) -> Tensor:
    """What to hook for the gradient of an output, in this or another shape.

    Linear returns a view where its input has more than two dimensions. An operation
    in place behind it (ReLU) cuts the view's node out of the graph, not the base's.
    """
    base = output._base
    if base is None or base.numel() != output.numel() or not base.requires_grad:
        return output
    return base
