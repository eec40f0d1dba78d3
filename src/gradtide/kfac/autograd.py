"""What statistics have to know of torch's autograd beyond its documented surface."""

from __future__ import annotations

import torch
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


def in_backward() -> bool:
    """Whether a forward runs inside a backward: activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)
