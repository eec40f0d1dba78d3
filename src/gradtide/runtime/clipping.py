"""Clipping by the 2-norm of all gradients, deferred ones and those of shards too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradtide.core.grouped import alike
from gradtide.runtime.owned import squares
from gradtide.transport.shards import Shards, Spread


def clip(
    grads: Sequence[tuple[Spread, Tensor]],
    known: Mapping[Spread, float] | None,
    shards: Shards,
    max_norm: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale gradients to a 2-norm of at most `max_norm`; returns the norm before.

    Of each gradient there is what this rank has, with how its parameter is divided. The
    squares of the norms of all that are divided alike may be `known`.
    """
    kinds = alike(grad for _, grad in grads)
    where = grads[0][1].device if grads else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=where)
    for spread in shards.spreads:
        if known is None:
            own = _square([grad for other, grad in grads if other == spread], where)
        else:
            square = known.get(spread, 0.0)
            own = torch.tensor(square, dtype=torch.float64, device=where)
        total += shards.total(own, spread)
    double = any(own[0].dtype in (torch.float64, torch.complex128) for own in kinds)
    norm = total.sqrt().to(torch.float64 if double else torch.float32)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of the averaged gradients is {norm.item()}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # Only the host's value is free to read.
    if factor.is_cuda or float(factor) != 1.0:
        for members in kinds:
            torch._foreach_mul_(members, factor.to(members[0].device))
    return norm


def _square(grads: list[Tensor], where: torch.device) -> Tensor:
    """The square of the 2-norm of gradients, in float64."""
    found = [squares(members).sum().to(where) for members in alike(grads)]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=where)
    return torch.stack(found).sum()
