"""Numbers between the host and a device, so that nothing waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """The host's numbers as the device has them, for which nothing waits.

    A copy from memory that is not pinned lets the host wait for all that is queued.
    """
    if device.type == "cuda":
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device)


def on_device(
    numbers: Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor (1-D) of numbers that the host knows; see `sent`."""
    return sent(torch.from_numpy(np.array(numbers)).to(dtype), device)


def unlike(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool | Tensor:
    """Whether the tensors of any pair differ; a NaN differs from itself.

    Of tensors on a device a tensor tells it there, for which the host has to wait.
    """
    if all(x.is_cpu for x, _ in pairs):
        return not all(torch.equal(x, y) for x, y in pairs)
    return _unlike_there(pairs)


def _unlike_there(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    found = [torch.ne(x, y).any() for x, y in pairs]
    return torch.stack([each.to(found[0].device) for each in found]).any()
