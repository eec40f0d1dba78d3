"""What the host waits for on a GPU, or would if all tensors were on one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Inside, operations that would have the host wait are noted in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __enter__(self) -> list[str]:
        super().__enter__()
        return self.seen

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


@contextmanager
def synchronised() -> Iterator[list[str]]:
    """Inside, what the host really waits for is noted in a list."""
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
            seen += [str(w.message) for w in told if "synchroniz" in str(w.message)]
