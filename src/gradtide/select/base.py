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


def within(
    select: Selector, x: Tensor, span: slice, k: int, state: dict[str, Tensor]
) -> Tensor:
    """Like `select(x, k, state)`, but only the slice `span` of `x` is looked at.

    Ranks that each look at another part select exclusively. About `k` indices into `x`;
    an empty part has none.
    """
    part = x[span]
    begin = span.indices(x.numel())[0]
    dtype = torch.int32 if x.numel() < 1 << 31 else torch.int64
    if not len(part):
        return torch.empty(0, dtype=dtype, device=x.device)
    return select(part, k, state).to(dtype) + begin
