"""All that gradtide uses of torch beyond its documented surface: the one door to it.

Whoever needs more puts it here, by a name that says what it is for, and on the list of
tests/core/test_torch_internals.py, which asks the torch at hand for every such name.
What takes long to import, or is not in every torch, has a file of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
)
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

aten: Any = torch.ops.aten
Kind = TypeVar("Kind", bound=Tensor)

# torch.profiler.record_function costs 30 us a call, this 1 us, with no profiler on.
record_function = _RecordFunctionFast
disable_dynamo = _disable_dynamo  # torch.compiler.disable loads all of it

# - Lists of tensors in one call -------------------------------------------------------

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_
foreach_zero_ = torch._foreach_zero_
unscale_ = torch._amp_foreach_non_finite_check_and_unscale_  # a gradient scaler's

# As the dispatcher has them.
FOREACH_ZERO = aten._foreach_zero_.default
FOREACH_MUL = (aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor)
FOREACH_DIV = (aten._foreach_div_.Scalar, aten._foreach_div_.Tensor)
FOREACH_NORM = aten._foreach_norm.Scalar
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


def writes(operation: Any) -> bool:
    """Whether an operation of the dispatcher writes to what it is given."""
    return bool(operation._schema.is_mutable)


# - Tensors ----------------------------------------------------------------------------

# Attributes with hooks: they say nothing of values.
HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
get_data = vars(torch._C.TensorBase)["data"].__get__
without_torch_function = torch._C.DisableTorchFunctionSubclass


def stand_in(kind: type[Kind], p: Tensor) -> Kind:
    """A tensor of a class, without memory, that looks like `p`."""
    made: Kind = Tensor._make_wrapper_subclass(
        kind, p.size(), dtype=p.dtype, device=p.device
    )
    return made


def base_of(x: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, for autograd."""
    return x._base


def storage_address(storage: torch.UntypedStorage) -> int:
    """Where torch has what it knows of a storage."""
    return int(storage._cdata)


# How many have a storage, by its address: asked for each parameter in every step.
storage_references = torch._C._storage_Use_Count


def accumulation_hooks(p: Tensor) -> list[Any]:
    """The hooks that are called when a gradient is complete."""
    return [*(p._post_accumulate_grad_hooks or {}).values()]


# - Modules and optimizers -------------------------------------------------------------


def tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own submodules and parameters by name: its tables, not copies."""
    return module._modules, module._parameters


def ignored_by_ddp(model: nn.Module) -> Iterator[str]:
    """The names that a model tells DDP to leave alone."""
    yield from getattr(model, "_ddp_params_and_buffers_to_ignore", ())


def forward_pre_hooks(module: nn.Module) -> OrderedDict[int, Any]:
    """What is called before a module's forward, by the numbers of handles."""
    hooks: Any = module._forward_pre_hooks
    found: OrderedDict[int, Any] = hooks
    return found


def embrace_step(optimizer: Optimizer, before: Any, after: Any) -> None:
    """Have hooks, by handles, called as the last before a step and the first after it.

    Not to be called while they are.
    """
    ordered: Any = optimizer  # its hooks are in an OrderedDict
    for hooks, handle, last in (
        (ordered._optimizer_step_pre_hooks, before, True),
        (ordered._optimizer_step_post_hooks, after, False),
    ):
        if handle.id in hooks:
            hooks.move_to_end(handle.id, last=last)


def forget_step_hooks(optimizer: Optimizer) -> None:
    """Have an optimizer's step call no hooks."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
