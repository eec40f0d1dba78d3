"""What can be trained, checked on each rank before anything is exchanged.

And what is added afterwards, checked at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from gradtide.autograd import Hook
from gradtide.bucket import Collective, traits
from gradtide.probing import probe
from gradtide.schedule import Schedule

# Where torch's own ways to exchange gradients are defined: DistributedDataParallel,
# replicate(), fully_shard() and FullyShardedDataParallel, as classes of a module.
EXCHANGING = (
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
)


def admit(
    model: nn.Module, optimizer: Optimizer, schedule: Schedule, buffers: str
) -> None:
    """Raise ValueError, naming the remedy, for what cannot be replicated."""
    _admit_model(model)
    admit_optimizer(model, optimizer, schedule)
    if buffers not in ("broadcast", "local"):
        raise ValueError(f"buffers={buffers!r}: use 'broadcast' or 'local'")


def _admit_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith(EXCHANGING):
                raise ValueError(
                    f"{name or 'the model'} is a {kind.__name__} of torch's "
                    f"({kind.__module__}), which exchanges gradients itself: pass the "
                    "plain module"
                )
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
    if _replicated(p):
        raise ValueError(f"{name} is replicated already: call sync.remove() first")


def _replicated(p: Tensor) -> bool:
    hooks = p._post_accumulate_grad_hooks
    return any(getattr(hook, "gradtide", False) for hook in (hooks or {}).values())


def admit_collective(
    model: nn.Module, collective: Collective, schedule: Schedule
) -> None:
    """Raise ValueError, naming the remedy, for numbers that a scheme cannot exchange.

    Complex ones have no order to select by, and what is cast, factorised or weighed is
    real: they are only added up.
    """
    exact = traits(collective).dense and getattr(collective, "wire", None) is None
    if exact and schedule.launch != "step":
        return
    for name, p in model.named_parameters():
        if p.requires_grad and p.is_complex():
            raise ValueError(
                f"{name} is complex, which {collective!r} with {schedule!r} cannot "
                "exchange: use 'wfbp' or 'dear', or keep a real parameter and "
                "torch.view_as_complex() in the forward"
            )


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
    if schedule.launch == "step":
        _admit_steps(optimizer)
    if schedule.update == "forward" and isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS uses all parameters at once, so its step cannot be deferred: use a "
            "schedule that updates at step(), such as 'wfbp'"
        )
    if left_out and not ordinary:
        raise ValueError(
            f"{left_out[0]} requires a gradient but is not in the optimizer, so a "
            "deferred update, or an exchange of steps, would lose it: add it to a "
            "group, freeze it, or use 'wfbp'"
        )


def _admit_steps(optimizer: Optimizer) -> None:
    """Raise ValueError where steps cannot be exchanged."""
    name = type(optimizer).__name__
    if callable(getattr(optimizer, "eval", None)):  # as schedule-free ones
        raise ValueError(
            f"{name}.eval() moves parameters outside step(), on every rank by what it "
            "remembers alone: use a schedule that exchanges gradients, such as 'wfbp'"
        )
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise ValueError(
            f"{name} holds an optimizer that makes its steps, perhaps without its own "
            "step(): pass the optimizer inside, or use a schedule that exchanges "
            "gradients, such as 'wfbp'"
        )
    probe(optimizer)


class Admitted:
    """What a replica was made for; anything else is refused by name.

    At every step trainable parameters that came later, for no bucket has them; at every
    forward DistributedDataParallel around the model, which would average once more.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._known = {p for _, p in self._trainable()}
        alone = Hook(lambda *_: _alone())
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            # Whether torch's replicate() was called before or after.
            model.register_forward_pre_hook(alone),
            model.register_forward_hook(alone),
        ]
        self._look()

    def remove(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()

    def _trainable(self) -> Iterator[tuple[str, Tensor]]:
        """What the model has and what the optimizer steps, by name."""
        named: list[tuple[str, Tensor]] = list(self._model.named_parameters())
        for i, group in enumerate(self._optimizer.param_groups):
            named += [
                (f"a parameter of the optimizer's group {i}", p)
                for p in group["params"]
            ]
        return ((name, p) for name, p in named if p.requires_grad)

    def _look(self) -> None:
        """Note what is there, so that `_signs` tell when that changes."""
        self._tables = [
            table
            for module in self._model.modules()
            for table in (module._modules, module._parameters)
        ]
        self._frozen = [p for p in self._model.parameters() if not p.requires_grad]
        self._last = self._signs()

    def _signs(self) -> list[int]:
        """Other numbers where anything was added or thawed.

        Hot path: in every step. To go through the model takes ten times as long.
        """
        groups = self._optimizer.param_groups
        return [
            *map(id, chain.from_iterable(group["params"] for group in groups)),
            *map(len, self._tables),
            *(p.requires_grad for p in self._frozen),
        ]

    def _before_step(self) -> None:
        if self._signs() == self._last:
            return
        for name, p in self._trainable():
            if p not in self._known and not _replicated(p):
                raise RuntimeError(
                    f"{name} was added or unfrozen after replicate(), so no bucket "
                    "has it and it would not be averaged: call sync.remove() on every "
                    "rank and replicate() again"
                )
        self._look()


def _alone() -> None:
    """Nothing else averages in this forward."""
    if DistributedDataParallel._active_ddp_module is not None:
        raise RuntimeError(
            "the model runs inside DistributedDataParallel or torch's replicate(), "
            "which exchanges gradients itself: leave that out, or call sync.remove()"
        )
