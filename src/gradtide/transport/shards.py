"""A parameter's local tensor: what this rank has of one that is sharded.

Parameters that FSDP2 or tensor parallelism has sharded are DTensors: each rank of a
mesh has a part. gradtide averages over other ranks than those, so that to it a
parameter is its local tensor. Only this module knows more: of which kind a parameter
and its gradient are, who has the other parts, and how numbers are added up over all.

[Note: shards] Numbers are added up over one dimension of the mesh after the other, by
the mesh's own groups: all that are in a mesh call at the same point of their programs,
as they do for the parameters themselves. They are gathered and added up in the order of
ranks, so that the sum has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradtide.core.torch_internals import distributed

# Over which dimensions of a mesh a tensor is divided: the names of their groups.
Spread: TypeAlias = tuple[str, ...]


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Whether a tensor is a DTensor; torch's module of these need not be loaded."""
    return hasattr(type(tensor), "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: all of it, unless it is sharded."""
    if not is_sharded(tensor):
        return tensor
    held = distributed.part_of(tensor)
    if type(held) is not Tensor and hasattr(held, "wait"):  # it has yet to arrive
        held = held.wait()
    return held


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """`part` as this rank's part of one that is sharded as `tensor` is."""
    return distributed.sharded_like(tensor, part) if is_sharded(tensor) else part


def redistribute(p: nn.Parameter) -> None:
    """Have the gradient of a parameter sharded as the parameter is.

    What tensor parallelism adds up later is partial when autograd is done with it. All
    ranks of the mesh call this at the same point.
    """
    grad: Any = p.grad
    if grad is not None and is_sharded(p) and grad.placements != p.placements:
        p.grad = grad.redistribute(placements=p.placements)


def described(tensor: Tensor) -> str:
    """What ranks that have the same part of a tensor have in common."""
    text = f"{tuple(tensor.shape)} {tensor.dtype}{_quantisation(tensor)}"
    if not is_sharded(tensor):
        return text
    mesh = tensor.device_mesh
    return (
        f"{text}, part {tuple(mesh.get_coordinate())} of {tuple(mesh.shape)} by "
        f"{tensor.placements}, {tuple(local(tensor).shape)}"
    )


def _quantisation(tensor: Tensor) -> str:
    """By what the integers of a quantised tensor are scaled, which does not travel."""
    if not tensor.is_quantized:
        return ""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f" of {tensor.q_scale()!r} from {tensor.q_zero_point()}"
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return f" of {scales.tolist()} from {zeros.tolist()}"


def refusal(p: Tensor, ranks: Iterable[int]) -> str | None:
    """Why a parameter's parts cannot be averaged over some ranks; None if they can."""
    if not is_sharded(p):
        return None
    mesh, ours = p.device_mesh, set(ranks)
    if any(placement.is_partial() for placement in p.placements):
        return "is a sum that is not finished (Partial): redistribute() it before"
    shared = ours & set(mesh.mesh.flatten().tolist())
    if len(shared) > 1:
        names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
        over = f"the mesh {names}" if names else f"a mesh of {shape}"
        return (
            f"is sharded or replicated by torch over {over}, and ranks "
            f"{sorted(shared)} of it are to average it: their parts differ. Build a "
            "mesh of two dimensions, as init_device_mesh(type, (hosts, ranks), "
            "mesh_dim_names=('outer', 'inner')), shard over mesh['inner'] alone, and "
            "pass process_group=mesh.get_group('outer')"
        )
    if type(local(p).detach()) is not Tensor:
        return f"is sharded, and its parts are of {type(local(p)).__name__}"
    return None


def unmanaged(model: nn.Module) -> str | None:
    """The trainable parameter that FSDP2 leaves out while it shards others.

    Each rank would have its own gradient for it, and nobody averages them.
    """
    groups = list(distributed.fsdp_groups(model))
    if not groups:
        return None
    managed = {id(one.sharded_param) for group in groups for one in group.fsdp_params}
    named = model.named_parameters()
    left = (n for n, p in named if p.requires_grad and id(p) not in managed)
    return next(left, None)


def unsharded(model: nn.Module) -> set[int]:
    """The ids of what FSDP2 puts in the place of parameters while they are whole."""
    found = (
        one for group in distributed.fsdp_groups(model) for one in group.fsdp_params
    )
    return {id(distributed.unsharded(one)) for one in found}


class Shards:
    """Who has the other parts of some parameters, see [Note: shards]."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.spreads: list[Spread] = []  # in an order that all ranks have
        self._groups: dict[str, tuple[dist.ProcessGroup, str]] = {}
        for p in params:
            if spread(p) not in self.spreads:
                self.spreads.append(spread(p))
            for name, group, _ in _axes(p):
                self._groups.setdefault(name, group)

    def __bool__(self) -> bool:
        """Whether anything is sharded."""
        return bool(self._groups)

    @property
    def number(self) -> tuple[int, int]:
        """This rank's number among all that have parts, and how many these are."""
        number, count = 0, 1
        for group, _ in self._groups.values():
            number = number * group.size() + group.rank()
            count *= group.size()
        return number, count

    def everywhere(self, numbers: Tensor) -> Tensor:
        """Numbers added up over all ranks that have parts of anything."""
        return self.total(numbers, tuple(self._groups))

    def anywhere(self, true: bool) -> bool:
        """Whether something is true on any of these ranks."""
        return bool(
            self.everywhere(torch.tensor(int(true), dtype=torch.int64, device="cpu"))
            if self
            else true
        )

    def total(self, numbers: Tensor, spread: Spread) -> Tensor:
        """Numbers added up over the parts of what is divided in one way."""
        for name in spread:
            group, device = self._groups[name]
            own = numbers.to(device)
            found = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(found, own, group=group)
            numbers = torch.stack(found).sum(0).to(numbers.device)
        return numbers


def spread(tensor: Tensor) -> Spread:
    """Over which dimensions of its mesh a tensor is divided; none if it is whole."""
    return tuple(name for name, _, divided in _axes(tensor) if divided)


def _axes(tensor: Tensor) -> Iterator[tuple[str, Any, bool]]:
    """The dimensions of a tensor's mesh.

    Of each the group's name, the group and its device, and whether it is divided.
    """
    if not is_sharded(tensor):
        return
    mesh = tensor.device_mesh
    for i, placement in enumerate(tensor.placements):
        group = mesh.get_group(i)
        divided = not placement.is_replicate()
        yield group.group_name, (group, mesh.device_type), divided
