"""Damped inverses of factors, and gradients preconditioned with them.

Two forms, of A [groups, a, a] and G [groups, g, g] and a gradient V [groups, g, a]:

- "inverse", factored Tikhonov damping (Martens and Grosse, 2015, section 6.3):
  (G + sqrt(damping) / pi I)^-1 V (A + pi sqrt(damping) I)^-1 with
  pi = sqrt((tr A / a) / (tr G / g)). Symmetric: packs.
- "eigen", exact damping of the Kronecker product (George et al., 2018; KAISA):
  Q_G [(Q_G^T V Q_A) / (l_G l_A^T + damping)] Q_A^T.

Nothing here waits for a device, but for the check of a factorisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtide.kfac.layers import Kind, Layer

ATTEMPTS = 4  # each with ten times the damping of the one before


class Eigen(NamedTuple):
    """An eigendecomposition: values [groups, d], none negative, and vectors."""

    values: Tensor
    vectors: Tensor  # [groups, d, d], in columns


# Of A and G, in one form: damped inverses [groups, d, d], or decompositions.
Inverses: TypeAlias = dict[Kind, Tensor | Eigen]


def precondition(gradient: Tensor, inverses: Inverses, damping: float) -> Tensor:
    """V [groups, g, a] between both sides of its layer."""
    a, g = inverses["A"], inverses["G"]
    if isinstance(a, Eigen) and isinstance(g, Eigen):
        inner = g.vectors.mT @ gradient @ a.vectors
        inner /= g.values[:, :, None] * a.values[:, None, :] + damping
        return g.vectors @ inner @ a.vectors.mT
    assert isinstance(a, Tensor)
    assert isinstance(g, Tensor)
    return g @ gradient @ a


def numel(layer: Layer, kind: Kind, form: str) -> int:
    """Elements of an inverse as it travels: packed, or values and vectors."""
    groups, d, _ = layer.shape(kind)
    return groups * d * (d + 1) if form == "eigen" else layer.numel(kind)


def dampings(mean_a: Tensor, mean_g: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """What to add to the diagonals: pi sqrt(damping) of A, sqrt(damping) / pi of G.

    Of the means of the diagonals, [groups] as the results. pi is 1 where a factor is
    all zeros.
    """
    ratio = mean_a / mean_g
    usable = torch.isfinite(ratio) & (ratio > 0)
    pi = torch.where(usable, ratio, torch.ones_like(ratio)).sqrt()
    root = damping**0.5
    return pi * root, root / pi


def inverse(factor: Tensor, damping: Tensor, name: str) -> Tensor:
    """(factor + damping I)^-1 of [groups, d, d] with damping [groups]; by Cholesky.

    Where rounding has made the factor indefinite, more damping is tried. Raises
    RuntimeError with `name` when that does not help. `factor` is not changed.
    """
    for attempt in range(ATTEMPTS):
        damped = factor.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_((damping * 10.0**attempt)[:, None])
        lower, info = torch.linalg.cholesky_ex(damped)
        if not info.any():
            return torch.cholesky_inverse(lower)
    raise RuntimeError(
        f"{name} cannot be inverted, not even with {10 ** (ATTEMPTS - 1)} times the "
        "damping: raise KFAC's damping, or lower the learning rate if the loss diverges"
    )


def eigen(factor: Tensor, name: str) -> Eigen:
    """The eigendecomposition of [groups, d, d]; values below 0, by rounding, are 0.

    Raises RuntimeError with `name` when it does not converge.
    """
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"{name} has no eigendecomposition: use the form 'inverse', or lower the "
            "learning rate if the loss diverges"
        ) from error
    return Eigen(values.clamp_(min=0), vectors)


def kl_part(gradient: Tensor, preconditioned: Tensor, lr: float) -> Tensor:
    """A layer's part of the sum for `kl_scale`: lr^2 <P, V>, a scalar."""
    return torch.dot(gradient.flatten(), preconditioned.flatten()) * lr**2


def kl_scale(parts: list[Tensor], kl_clip: float) -> Tensor:
    """nu = min(1, sqrt(kl_clip / |sum of parts|)) (Ba et al., 2017)."""
    return (kl_clip / torch.stack(parts).sum().abs()).sqrt().clamp(max=1.0)


def write_back(
    layer: Layer,
    preconditioned: Tensor,
    gradients: Sequence[Tensor],
    scale: Tensor | float = 1.0,
) -> None:
    """Overwrite a layer's gradients with `scale` times the preconditioned ones."""
    for new, old in zip(layer.tensors(preconditioned), gradients, strict=True):
        old.copy_(new * scale)
