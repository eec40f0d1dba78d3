"""What programs say to DistributedDataParallel, and ask of it, as gradtide has it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.optim import Optimizer

from gradtide.replica import Replica
from gradtide.runtime.layout.parameters import averaged
from gradtide.scheme import Scheme
from gradtide.transport import ProcessGroup


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


def sends_buffers(forward_sync: bool | None, broadcast: bool | None) -> bool:
    """Whether forwards begin with rank 0's buffers, by two arguments for it."""
    if broadcast is not None:
        warnings.warn(  # as DDP since torch 2.13
            "`broadcast_buffers` is deprecated by torch: use forward_sync_buffers, "
            "with which buffers start as rank 0's in any case",
            FutureWarning,
            stacklevel=3,
        )
    given = (flag for flag in (forward_sync, broadcast) if flag is not None)
    return next(given, True)


def wires_of_hooks() -> dict[Callable[..., Any], str | None]:
    """Torch's communication hooks that are exact but for a `wire`, which is named."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return {
        default_hooks.allreduce_hook: None,
        default_hooks.fp16_compress_hook: "fp16",
        default_hooks.bf16_compress_hook: "bf16",
    }


# - What is asked of it ----------------------------------------------------------------


class Log:
    """The errors that DDP logs, and those who use it ask for."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def set_error_and_log(self, message: str) -> None:
        self.said = {"has_error": 1, "error": message}


def logging_data(ddp: Torchs, replica: Replica, hook: str | None) -> dict[str, Any]:
    """What DDP logs and there is here, under DDP's keys; `hook` is the name of one."""
    params = [p for _, p in averaged(ddp.module)]
    group = replica.engine.group
    return {
        "world_size": group.size,
        "rank": group.rank,
        "module_name": type(ddp.module).__name__,
        "scheme": repr(replica.scheme),
        **({} if hook is None else {"comm_hook": hook}),
        "device_ids": ", ".join(map(str, ddp.device_ids or ())),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.broadcast_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(p.nbytes for p in params),
        "iteration": replica.num_exchanges,
        **getattr(ddp.logger, "said", {}),
    }


def reducer(exchange: Callable[[], None]) -> SimpleNamespace:
    """What answers those who talk to DDP's Reducer, as Lightning and torch do.

    `exchange` has the next backward exchange.
    """

    def nothing(*_: object) -> None: ...

    return SimpleNamespace(
        prepare_for_backward=lambda *_: exchange(),
        prepare_for_forward=nothing,
        _rebuild_buckets=lambda: False,
        _check_reducer_finalized=nothing,
        _remove_autograd_hooks=nothing,
        _set_ddp_runtime_logging_sample_rate=nothing,
    )
