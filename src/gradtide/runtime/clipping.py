"""Clipping by the 2-norm of all gradients, deferred ones and those of shards too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

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
    kinds = _kinds(grad for _, grad in grads)
    where = grads[0][1].device if grads else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=where)
    for spread in shards.spreads:
        if known is None:
            own = _square([grad for other, grad in grads if other == spread], where)
        else:
            own = torch.tensor(
                known.get(spread, 0.0), dtype=torch.float64, device=where
            )
        total += shards.total(own, spread)
    double = any(dtype in (torch.float64, torch.complex128) for dtype, _ in kinds)
    norm = total.sqrt().to(torch.float64 if double else torch.float32)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of the averaged gradients is {norm.item()}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # Only the host's value is free to read.
    if factor.is_cuda or float(factor) != 1.0:
        for (_, device), members in kinds.items():
            torch._foreach_mul_(members, factor.to(device))
    return norm


def _kinds(
    grads: Iterable[Tensor],
) -> Mapping[tuple[torch.dtype, torch.device], list[Tensor]]:
    """Gradients by dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    return kinds


def _square(grads: list[Tensor], where: torch.device) -> Tensor:
    """The square of the 2-norm of gradients, in float64."""
    found = [squares(alike).sum().to(where) for alike in _kinds(grads).values()]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=where)
    return torch.stack(found).sum()
