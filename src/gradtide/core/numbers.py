"""Numbers that the host knows, for a device: nobody waits for them to get there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def on_device(
    numbers: Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor (1-D) of numbers.

    Of memory that is not pinned a copy is made before the call returns: only the way
    from there is not waited for.
    """
    host = torch.from_numpy(np.array(numbers)).to(dtype)
    return host.to(device, non_blocking=True)
