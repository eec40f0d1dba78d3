"""What is handed out of entries: their indices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scan(NamedTuple):
    """Entries that were looked for: on a GPU only the device knows yet how many.

    Who reads `number` waits for it. So many of the indices, and of the values if these
    were asked for, stand for something.
    """

    number: Tensor
    indices: Tensor
    values: Tensor | None = None


def index_dtype(n: int) -> torch.dtype:
    """What indices below `n` are handed out in."""
    return torch.int32 if n < 1 << 31 else torch.int64


def everything(x: Tensor) -> Tensor:
    """The indices of all of `x`."""
    return torch.arange(x.numel(), dtype=index_dtype(x.numel()), device=x.device)
