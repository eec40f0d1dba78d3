"""From the user's process group and device to a transport."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from gradtide.core.transport import Transport


def connect(process_group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    """Connect the ranks of a process group for tensors on one device.

    This is a collective call. The transport communicates on groups of its own, so that
    nothing the user sends on his group can come between two of its requests. A
    transport for GPU tensors warns, once in a process, that it has never been run.

    Args:
        process_group: The ranks. None stands for all ranks, the default group.
        device: Where the tensors are. On a GPU they travel over NCCL if the group has
            that backend, and otherwise over Gloo, through host memory.

    Returns:
        The transport. Its `close()` gives up its groups.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "gradtide needs torch.distributed: call "
            "torch.distributed.init_process_group() first, and start the script with "
            "torchrun (on one machine: torchrun --nproc-per-node 2 train.py)"
        )
    # Here, as no program that imports gradtide for its schemes alone needs them.
    from gradtide.transport.gloo import GlooTransport
    from gradtide.transport.hosts import equal_runs, host_name

    parent = process_group or dist.group.WORLD
    assert parent is not None
    gloo = GlooTransport(_sibling(parent, "gloo"))
    gloo.ranks_per_host = equal_runs(gloo.gather_objects(host_name()))
    if device.type == "cpu":
        return gloo
    if device.type == "cuda" and "nccl" in _backends(parent):
        from gradtide.transport.nccl import NcclTransport

        return NcclTransport(_sibling(parent, "nccl"), gloo)
    from gradtide.transport.staged import StagedTransport

    return StagedTransport(gloo, device)


def group_of(
    ranks: dist.ProcessGroup | DeviceMesh | None,
) -> dist.ProcessGroup | None:
    """The process group of a mesh of one dimension; a process group is one already.

    Raises:
        ValueError: The mesh has several dimensions.
    """
    if not isinstance(ranks, DeviceMesh):
        return ranks
    if ranks.ndim != 1:
        raise ValueError(
            f"{ranks} has {ranks.ndim} dimensions: pass the one over which gradients "
            "are to be averaged, such as mesh['outer']"
        )
    found: dist.ProcessGroup = ranks.get_group()
    return found


def members(process_group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of a group, by their numbers in the default group."""
    parent = process_group or dist.group.WORLD
    assert parent is not None
    return dist.get_process_group_ranks(parent)


def _sibling(parent: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """A new group of the parent's ranks, with the parent's timeout."""
    ranks = members(parent)
    timeout = _timeout(parent)
    group = dist.new_group(
        ranks,
        backend=backend,
        timeout=timeout,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc=f"gradtide {backend}",
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _timeout(parent: dist.ProcessGroup) -> timedelta:
    device = "cpu" if "gloo" in _backends(parent) else "cuda"
    return parent._get_backend(torch.device(device)).options._timeout


def _backends(parent: dist.ProcessGroup) -> str:
    return str(dist.get_backend_config(parent))
