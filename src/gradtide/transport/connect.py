"""From the user's process group and device to a transport."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gradtide.core.ops import Group
from gradtide.core.torch_internals.distributed import end_after_gloo, timeout_of
from gradtide.core.transport import CommunicationError, Transport

if TYPE_CHECKING:
    from gradtide.transport.gloo import GlooTransport
    from gradtide.transport.hosts import Whereabouts

LOG = logging.getLogger("gradtide.transport")

# Hosts and their ranks; or the groups of both that this rank is in.
Mesh: TypeAlias = DeviceMesh | tuple[ProcessGroup, ProcessGroup]


def connect(
    process_group: ProcessGroup | Mesh | None, device: torch.device
) -> Transport:
    """Connect the ranks of a process group for tensors on one device.

    This is a collective call. The transport communicates on groups of its own, so that
    nothing the user sends on his group can come between two of its requests. A
    transport for GPU tensors warns, once in a process, that it has hardly been run.

    Args:
        process_group: The ranks. None stands for all ranks, the default group. A mesh
            of two dimensions, or a pair of groups, says which ranks share a host.
        device: Where the tensors are. On a GPU they travel over NCCL if the group has
            that backend, and otherwise over Gloo, through host memory; inside hosts
            over NCCL, too, if that backend is the one of the inner group alone.

    Returns:
        The transport. Its `close()` gives up its groups.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: The mesh has more than two dimensions, or ranks have devices of
            unlike kinds.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "gradtide needs torch.distributed: call "
            "torch.distributed.init_process_group() first, and start the script with "
            "torchrun (on one machine: torchrun --nproc-per-node 2 train.py)"
        )
    end_after_gloo()
    # Here, as no program that imports gradtide for its schemes alone needs them.
    from gradtide.transport.hosts import hosts_of

    parent, by_hand = _members(process_group)
    ranks = dist.get_process_group_ranks(parent)
    if by_hand is not None:
        ranks = sorted(rank for host in by_hand for rank in host)
    gloo, places = _meet(parent, ranks, device.type)
    if by_hand is None:
        gloo.hosts = hosts_of(places)
    else:
        gloo.hosts = tuple(tuple(map(ranks.index, host)) for host in by_hand)
    gloo.meet()
    LOG.debug("rank %d is connected; hosts have ranks %s", gloo.group.rank, gloo.hosts)
    if device.type == "cpu":
        return gloo
    if device.type == "cuda" and "nccl" in _backends(parent):
        from gradtide.transport.nccl import NcclTransport, cleaning_up_only

        with cleaning_up_only():
            group = _sibling(parent, ranks, "nccl")
        return NcclTransport(group, gloo, device)
    from gradtide.transport.staged import StagedTransport

    within = _within(process_group)
    if device.type == "cuda" and within is not None and "nccl" in _backends(within):
        from gradtide.transport.inside import InsideHost
        from gradtide.transport.links import LANES
        from gradtide.transport.nccl import cleaning_up_only

        own = dist.get_process_group_ranks(within)
        with cleaning_up_only():
            groups = [_sibling(within, own, "nccl") for _ in LANES]
        return StagedTransport(gloo, device, InsideHost(groups, gloo, device))
    return StagedTransport(gloo, device)


def _meet(
    parent: ProcessGroup, ranks: list[int], kind: str
) -> tuple[GlooTransport, list[Whereabouts]]:
    """Links to some ranks, and where these are, when all are there (`roll_call`)."""
    from gradtide.transport.fault import own_store
    from gradtide.transport.gloo import GlooTransport
    from gradtide.transport.hosts import whereabouts
    from gradtide.transport.opening import Meeting
    from gradtide.transport.roll_call import RollCall, store_is_lost

    seconds = _timeout(parent).total_seconds()
    meeting = Meeting(Group(ranks.index(dist.get_rank()), len(ranks)), seconds)

    def make(name: str) -> tuple[ProcessGroup, tuple[Any, Any]]:
        return _sibling(parent, ranks, "gloo"), (own_store(name), own_store(name))

    if len(ranks) == 1:
        group, stores = make("alone")
        return GlooTransport(group, meeting, stores), [whereabouts()]
    try:
        roll_call = RollCall(parent, ranks, meeting, seconds, kind)
        places = roll_call.answer()
        group, stores = roll_call.watch(lambda: make(roll_call.name))
    except dist.DistNetworkError as error:
        meeting.close()
        why = store_is_lost(ranks, meeting.rank)
        raise CommunicationError(
            f"rank {meeting.rank}: connecting failed: {why} ({error})"
        ) from error
    except Exception:
        meeting.close()
        raise
    return GlooTransport(group, meeting, stores), places


def _members(
    given: ProcessGroup | Mesh | None,
) -> tuple[ProcessGroup, list[list[int]] | None]:
    """A group to be like, and the ranks (of the world) of every host, if given."""
    if isinstance(given, DeviceMesh):
        if given.ndim > 2:
            raise ValueError(
                f"a mesh of {given.ndim} dimensions: pass the one or two over which "
                "gradients are averaged, such as mesh['hosts', 'ranks']"
            )
        return given.get_group(0), given.mesh.tolist() if given.ndim == 2 else None
    if isinstance(given, tuple):
        between, inside = given
        rows: list[Any] = [None] * between.size()
        dist.all_gather_object(rows, dist.get_process_group_ranks(inside), between)
        return between, rows
    parent = given or dist.group.WORLD
    assert parent is not None
    return parent, None


def seconds_of(given: ProcessGroup | Mesh | None) -> float:
    """How long ranks that train together wait for each other: their group's timeout."""
    if isinstance(given, DeviceMesh):
        return _timeout(given.get_group(0)).total_seconds()
    group = given[0] if isinstance(given, tuple) else given or dist.group.WORLD
    assert group is not None
    return _timeout(group).total_seconds()


def _within(given: ProcessGroup | Mesh | None) -> ProcessGroup | None:
    """The given group of the ranks of this host."""
    if isinstance(given, DeviceMesh):
        return given.get_group(1) if given.ndim == 2 else None
    return given[1] if isinstance(given, tuple) else None


def members(given: ProcessGroup | Mesh | None) -> list[int]:
    """The ranks that train together, by their numbers in the default group.

    Of a pair of groups these are the ranks that share one with this rank.
    """
    if isinstance(given, DeviceMesh):
        found: list[int] = given.mesh.flatten().tolist()
        return found
    groups = given if isinstance(given, tuple) else (given or dist.group.WORLD,)
    return sorted({r for group in groups for r in dist.get_process_group_ranks(group)})


def _sibling(
    parent: dist.ProcessGroup, ranks: list[int], backend: str
) -> dist.ProcessGroup:
    """A new group of some ranks, with the parent's timeout."""
    group = dist.new_group(
        ranks,
        backend=backend,
        timeout=_timeout(parent),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc=f"gradtide {backend}",
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _timeout(parent: dist.ProcessGroup) -> timedelta:
    device = torch.device("cpu" if "gloo" in _backends(parent) else "cuda")
    return timeout_of(parent, device)


def _backends(parent: dist.ProcessGroup) -> str:
    return str(dist.get_backend_config(parent))
