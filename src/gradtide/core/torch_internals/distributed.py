"""Of torch.distributed: stores, groups' timeouts, DDP, DTensor, FSDP2."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch.distributed has these, too, but hides them from mypy.
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import (
    _BufferCommHookLocation as BufferCommHookLocation,
)

__all__ = ["BufferCommHookLocation", "GradBucket", "Store", "TCPStore"]


# - Stores, groups, DDP ----------------------------------------------------------------


def default_store() -> Store:
    """The store that the ranks of this job have met by."""
    return dist.distributed_c10d._get_default_store()


def count_groups_anew() -> None:
    """Have the next default group be called as in a process that has had none.

    Its name is the prefix of what its ranks tell each other, and has a number that
    torch sets back where a group is given up, but not where none came to be.
    """
    dist.distributed_c10d._world.group_count = 0


def timeout_of(pg: dist.ProcessGroup, device: torch.device) -> timedelta:
    """A group's, for what is on a device."""
    found: timedelta = pg._get_backend(device).options._timeout
    return found


@cache
def end_after_gloo() -> None:
    """Have this process end after Gloo's threads have let go of their tensors.

    A thread of Gloo frees the tensors of its last request after the wait for it is
    over, for which it needs the interpreter's lock. Where the interpreter has ended by
    then the process aborts ("terminate called without an active exception", with torch
    2.13 also under DDP), and torchrun counts the run as failed. So the lock is given
    up for a moment at the end.
    """
    atexit.register(time.sleep, 0.01)


def in_ddp() -> bool:
    """Whether this runs in the forward of torch's DDP, or of its replicate()."""
    return DistributedDataParallel._active_ddp_module is not None


def check_default_group(ddp: nn.Module) -> None:
    """RuntimeError, as DDP has it, for one that is pickled with a group of its own."""
    ddp._check_default_group()  # type: ignore[operator]


def log_and_throw(ddp: nn.Module, kind: type[Exception], message: str) -> NoReturn:
    """Raise, and have DDP's logger told."""
    throw: Any = ddp._log_and_throw
    throw(kind, message)
    raise kind(message)


# - What is sharded --------------------------------------------------------------------


def part_of(x: Tensor) -> Tensor:
    """What a DTensor has here.

    Not by `to_local()`, which makes a new view of each parameter, and a node where
    gradients are recorded.
    """
    part: Tensor = x._local_tensor  # type: ignore[attr-defined]
    return part


def sharded_like(x: Tensor, part: Tensor) -> Tensor:
    """A DTensor that is sharded as `x` is, of which `part` is here."""
    from torch.distributed.tensor import DTensor

    spec: Any = x._spec  # type: ignore[attr-defined]
    whole: Tensor = DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return whole


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """What FSDP2 gathers at once, of every module that it shards."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None:
            yield from groups_of(state())


def groups_of(state: Any) -> Iterable[Any]:
    """The same by the state of a module; torch 2.11 has one or None."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Iterable[Any] = state._fsdp_param_groups
        return groups
    one = state._fsdp_param_group
    return [] if one is None else [one]


def unsharded(param: Any) -> Any:
    """What FSDP2 has in the place of a parameter while it is whole, if anything."""
    return getattr(param, "_unsharded_param", None)
