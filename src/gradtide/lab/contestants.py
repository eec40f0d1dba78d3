"""The contestants of a comparison: gradtide's schemes, and DDP at its best.

Every contestant owns a model, an optimizer and a data stream, all from the same seed.
Knows how each is set up and asked; knows nothing of timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradtide.core.engine import Engine
from gradtide.core.payload import traits
from gradtide.core.schedule import WFBP, Schedule
from gradtide.lab.workloads import Workload
from gradtide.parallel import SCHEME
from gradtide.replica import Replica, replicate
from gradtide.scheme import Scheme, parse
from gradtide.scheme.spelling import respelled

# Name: what it is, and the type in which its gradients travel (None: their own).
BASELINES: dict[str, tuple[str, torch.dtype | None]] = {
    "ddp": ("DistributedDataParallel(bucket views, static graph)", None),
    "ddp(wire='bf16')": ("the same, gradients cast to bf16 by a hook", torch.bfloat16),
    "ddp(wire='fp16')": ("the same, gradients cast to fp16 by a hook", torch.float16),
}
_HOOKS = {
    torch.bfloat16: default_hooks.bf16_compress_hook,
    torch.float16: default_hooks.fp16_compress_hook,
}


@dataclass(frozen=True)
class Contestant:
    """One way of training one copy of the workload."""

    name: str
    workload: Workload
    module: nn.Module  # called in place of `workload.model`
    replica: Replica | None = None  # None: what is sent and waited for is not counted
    payload_bytes: float = 0.0  # sent per rank and step, where there is no replica

    @property
    def engine(self) -> Engine | None:
        return None if self.replica is None else self.replica.engine

    @property
    def schedule(self) -> Schedule:
        """When its exchanges leave and end: what bounds its step."""
        return WFBP if self.replica is None else self.replica.scheme.schedule

    @property
    def sparse(self) -> bool:
        """Whether some of the gradient stays behind."""
        found = self.replica
        return found is not None and not traits(found.scheme.collective).dense

    @property
    def became(self) -> str | None:
        """What it trains with now, as `auto` decided, if not what it was called."""
        if self.replica is None:
            return None
        called, found = parse(self.name), self.replica.scheme
        # How many ranks share a host is the cluster's, and no decision.
        same = replace(found, levels=called.levels) == called
        return None if same else repr(found)

    def clip(self, max_norm: float) -> None:
        if self.replica is None:
            nn.utils.clip_grad_norm_(self.workload.model.parameters(), max_norm)
        else:
            self.replica.clip_grad_norm_(max_norm)

    def flush(self) -> None:
        """Afterwards nothing travels and no update is due."""
        if self.replica is not None:
            self.replica.flush()

    def agreed(self) -> AbstractContextManager[None]:
        """Inside, the module has what all ranks agreed on last."""
        return (
            nullcontext() if self.replica is None else self.replica.shared_parameters()
        )

    def leave(self) -> None:
        """Give back what was opened; every rank must call this."""
        if self.replica is not None:
            self.replica.remove()


def named(name: str) -> Scheme | None:
    """The scheme, None for a baseline; `ValueError` for what is neither."""
    if respelled(name) != name and respelled(name) in BASELINES:
        raise ValueError(
            f"--schemes: {name!r} is an old spelling: use {respelled(name)}"
        )
    try:
        return None if name in BASELINES else parse(name)
    except ValueError as error:
        raise ValueError(
            f"--schemes: {name!r} is no scheme: {error}; beside schemes there are "
            f"{', '.join(BASELINES)}"
        ) from error


def enter(name: str, workload: Workload, size: int) -> Contestant:
    """The contestant called `name`, on a fresh workload; every rank must call this."""
    if name not in BASELINES:
        replica = replicate(workload.model, workload.optimizer, name)
        return Contestant(name, workload, workload.model, replica)
    os.environ.pop(SCHEME, None)  # a baseline is torch's own class
    module = DistributedDataParallel(
        workload.model, gradient_as_bucket_view=True, static_graph=True
    )
    dtype = BASELINES[name][1]
    if dtype is not None:
        module.register_comm_hook(None, casting(dtype))
    sent = ring_bytes(workload, size, dtype)
    return Contestant(name, workload, module, payload_bytes=sent)


def casting(dtype: torch.dtype) -> Callable[[Any, Any], Future[Tensor]]:
    """torch's hook that averages in `dtype`, on CPUs as well.

    Under another name: DDP refuses the one for bf16 by its name, although Gloo adds
    bf16 well.
    """
    return lambda group, bucket: _HOOKS[dtype](group, bucket)


def ring_bytes(workload: Workload, size: int, dtype: torch.dtype | None) -> float:
    """What a rank sends in one ring all-reduce of all gradients: 2 (P - 1) / P of them.

    `dtype` is what travels, None for each gradient's own type.
    """
    gradients = [p for p in workload.model.parameters() if p.requires_grad]
    wire = sum(p.numel() * (dtype or p.dtype).itemsize for p in gradients)
    return 2 * (size - 1) / size * wire
