"""What the host would wait for if all tensors were on a GPU, counted without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# A number that is copied there, or from there; a length that only the device knows.
WAITS = (
    "aten.lift_fresh",
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten._unique2",
    "aten.unique_consecutive",
    "aten.repeat_interleave",
)


class Waits(TorchDispatchMode):
    """Inside, operations that would have the host wait are noted in `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func.overloadpacket)
        masks = name == "aten.index" and any(
            isinstance(at, Tensor) and at.dtype == torch.bool for at in args[1]
        )
        told = name == "aten.repeat_interleave" and (kwargs or {}).get("output_size")
        if (name in WAITS and not told) or masks:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
