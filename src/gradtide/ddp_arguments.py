"""What programs say to DistributedDataParallel, as gradtide understands it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from gradtide.scheme import Scheme
from gradtide.transport import ProcessGroup


class Log:
    """The errors that DDP logs, and those who use it ask for."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def set_error_and_log(self, message: str) -> None:
        self.said = {"has_error": 1, "error": message}


def own_group(group: ProcessGroup | None, mesh: Any) -> ProcessGroup | None:
    """The ranks that train together; None if torch.distributed is not initialised."""
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(
            f"process_group is a {type(group).__name__}: pass what "
            "torch.distributed.new_group() returns, or None for all ranks"
        )
    if mesh is None:
        return group or dist.group.WORLD
    if group is not None:
        raise RuntimeError(  # as DDP
            "Cannot specify both process_group and device_mesh arguments."
        )
    if mesh.ndim != 1:
        raise RuntimeError(  # as DDP
            f"Only 1D device mesh is supported, but got {mesh}: pass mesh['dp']"
        )
    found: ProcessGroup = mesh.get_group(mesh_dim=0)
    return found


def only_device(device_ids: Sequence[Any] | None, device_type: str) -> list[int] | None:
    """The index of the one GPU, in a list; None without one."""
    if isinstance(device_ids, str | Scheme | Optimizer):
        raise TypeError(
            f"device_ids is a {type(device_ids).__name__}: pass schemes and optimizers "
            "by name, scheme='dear', optimizer=..."
        )
    if not device_ids:
        return None
    if device_type == "cpu" or len(device_ids) > 1:
        raise ValueError(
            f"device_ids={list(device_ids)} for a module on the {device_type}: one "
            "GPU, or None for a module on the CPU"
        )
    (only,) = device_ids
    return [only if isinstance(only, int) else torch.device(only).index]
