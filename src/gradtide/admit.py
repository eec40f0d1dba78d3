"""What can be trained, checked on each rank before anything is exchanged."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from gradtide.schedule import Schedule


def admit(
    model: nn.Module, optimizer: Optimizer, schedule: Schedule, buffers: str
) -> None:
    """Raise ValueError, naming the remedy, for what cannot be replicated."""
    _admit_model(model)
    admit_optimizer(model, optimizer, schedule)
    if buffers not in ("broadcast", "local"):
        raise ValueError(f"buffers={buffers!r}: use 'broadcast' or 'local'")


def _admit_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which exchanges "
            "gradients itself: pass the plain module"
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{name} has sparse gradients, which gradtide does not average: build "
                "the embedding with sparse=False"
            )
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("no parameter of the model requires a gradient")
    for name, p in trainable:
        _admit_parameter(name, p)


def _admit_parameter(name: str, p: nn.Parameter) -> None:
    if isinstance(p, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"{name} is lazy and has no shape yet: run one forward before replicate()"
        )
    if p.is_meta:
        raise ValueError(f"{name} is on the meta device: materialise the model first")
    if type(p.data) is not torch.Tensor:
        raise ValueError(
            f"{name} is a {type(p.data).__name__}: gradtide replicates plain tensors, "
            "not models that are sharded by FSDP or tensor parallelism"
        )
    if p._post_accumulate_grad_hooks and any(
        getattr(hook, "gradtide", False)
        for hook in p._post_accumulate_grad_hooks.values()
    ):
        raise ValueError(f"{name} is replicated already: call sync.remove() first")


def admit_optimizer(model: nn.Module, optimizer: Optimizer, schedule: Schedule) -> None:
    """Raise ValueError, naming the remedy, for a step that a schedule cannot defer."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    left_out = [name for name, p in named if id(p) not in stepped]
    if len(left_out) == len(named):
        raise ValueError(
            "the optimizer holds none of the model's parameters: build it from this "
            "model, after the model was moved to its device"
        )
    ordinary = schedule.update == "step" and schedule.launch != "step"
    joins = any(kind.__name__ == "Joinable" for kind in type(optimizer).__mro__)
    if joins and not ordinary:  # as ZeroRedundancyOptimizer
        raise ValueError(
            f"{type(optimizer).__name__} exchanges parameters inside its step, which "
            "can neither be deferred nor be a rank's own: use a schedule that updates "
            "at step(), such as 'wfbp'"
        )
    if schedule.update != "forward":
        return
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS uses all parameters at once, so its step cannot be deferred: use a "
            "schedule that updates at step(), such as 'wfbp'"
        )
    if left_out:
        raise ValueError(
            f"{left_out[0]} requires a gradient but is not in the optimizer, so a "
            "deferred update would lose it: add it to a group, freeze it, or use 'wfbp'"
        )
