"""What a collective needs of a selector."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Selector(Protocol):
    """Finds the entries of largest magnitude: a frozen dataclass of hyper-parameters.

    Returns the sorted unique indices (1-D, int32; int64 from 2^31 elements on) of about
    `k` entries of `x` (1-D). What it remembers between calls is in `state`, under keys
    of its own. Infinities and NaNs count as the largest magnitudes. At least one index
    is returned, and all of them where k >= n.
    """

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor: ...


def largest(x: Tensor, k: int, found: Tensor) -> Tensor:
    """The `k` of the indices `found` (sorted) where |x| is largest; all, if not more.

    NaN is largest, then infinity.
    """
    if len(found) <= k:
        return found
    best = torch.topk(x.index_select(0, found).abs(), k, sorted=False).indices
    chosen = torch.zeros_like(found, dtype=torch.bool)
    return found[chosen.index_fill_(0, best, True)]  # cheaper than a sort
