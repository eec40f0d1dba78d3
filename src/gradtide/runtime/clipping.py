"""Clipping by the 2-norm of all gradients, deferred ones too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip(
    grads: Sequence[Tensor],
    square: float | None,
    max_norm: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale gradients to a 2-norm of at most `max_norm`; returns the norm before.

    `square` is the square of that norm, if it is known.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    where = grads[0].device if grads else torch.device("cpu")
    if square is None:
        squares = [_square(members).to(where) for members in kinds.values()]
        own = torch.stack(squares).sum() if squares else torch.zeros(())
    else:
        own = torch.tensor(square, dtype=torch.float64, device=where)
    double = any(dtype in (torch.float64, torch.complex128) for dtype, _ in kinds)
    total = own.sqrt().to(torch.float64 if double else torch.float32)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of the averaged gradients is {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    # Only the host's value is free to read.
    if factor.is_cuda or float(factor) != 1.0:
        for (_, device), members in kinds.items():
            torch._foreach_mul_(members, factor.to(device))
    return total


def _square(grads: list[Tensor]) -> Tensor:
    """The square of the 2-norm of gradients of one dtype and device."""
    half = grads[0].dtype in (torch.float16, torch.bfloat16)
    norms = torch._foreach_norm(grads, 2, torch.float32 if half else None)
    return torch.stack(norms).double().square().sum()
