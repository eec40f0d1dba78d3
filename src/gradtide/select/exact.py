"""Exactly the k largest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.select.kernels import everything, index_dtype


@dataclass(frozen=True)
class Exact:
    """The k entries of largest magnitude, by torch.topk: the yardstick, and slow."""

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        if k >= x.numel():
            return everything(x)
        largest = torch.topk(x.abs(), max(k, 1), sorted=False).indices
        return largest.sort().values.to(index_dtype(x.numel()))
