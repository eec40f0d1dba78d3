"""The contestants of a comparison: gradtide's schemes, and DDP at its best.

Every contestant owns a model, an optimizer and a data stream, all from the same seed.
Knows how each is set up and asked; knows nothing of timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from gradtide.bucket import traits
from gradtide.engine import Engine
from gradtide.kfac.preconditioner import Preconditioner
from gradtide.lab.hooks import casting
from gradtide.lab.workloads import Workload
from gradtide.replicate import replicate
from gradtide.schedule import WFBP, Schedule
from gradtide.scheme import RECIPES, Scheme, parse

# Name: what it is, and the type in which its gradients travel (None: their own).
BASELINES: dict[str, tuple[str, torch.dtype | None]] = {
    "ddp": ("DistributedDataParallel(bucket views, static graph)", None),
    "ddp-bf16": ("the same, gradients cast to bf16 by a hook", torch.bfloat16),
    "ddp-fp16": ("the same, gradients cast to fp16 by a hook", torch.float16),
}


@dataclass(frozen=True)
class Contestant:
    """One way of training one copy of the workload."""

    name: str
    schedule: Schedule  # when its exchanges leave and end: what bounds its step
    workload: Workload
    module: nn.Module  # called in place of `workload.model`
    scheduler: LRScheduler | None
    clip: Callable[[float], object]
    flush: Callable[[], None]  # afterwards nothing travels and no update is due
    leave: Callable[[], None]  # give back what was opened; every rank must call this
    engine: Engine | None = None  # None: what was sent and waited for is not counted
    sparse: bool = False  # some of the gradient stays behind
    scheme: Callable[[], Scheme] | None = None  # of now: `auto` becomes another one
    payload_bytes: float = 0.0  # sent per rank and step, where there is no engine
    kfac: Preconditioner | None = None

    def settled(self) -> Contestant:
        """The same contestant as it is now, after its warm-up."""
        if self.scheme is None:
            return self
        now = self.scheme()
        sparse = not traits(now.collective).dense
        return replace(self, schedule=now.schedule, sparse=sparse)

    @property
    def became(self) -> str | None:
        """What it trains with now, if that is not what it was called."""
        now = self.scheme and self.scheme()
        return None if not now or parse(self.name) == now else repr(now)


def check_scheme(name: str) -> None:
    """`ValueError` unless `name` is a baseline, a recipe or a scheme's constructor."""
    if name in BASELINES:
        return
    try:
        parse(name)
    except ValueError as error:
        known = ", ".join([*BASELINES, *RECIPES])
        raise ValueError(
            f"--schemes: {name!r} is no scheme ({error}); use {known}, or a "
            "constructor call such as Scheme(Dense(), schedule=DEAR)"
        ) from error


def enter(name: str, workload: Workload, size: int) -> Contestant:
    """The contestant called `name`, on a fresh workload; every rank must call this."""
    if name in BASELINES:
        return _ddp(name, workload, size)
    sync = replicate(workload.model, workload.optimizer, name)
    return Contestant(
        name=name,
        schedule=sync.scheme.schedule,
        workload=workload,
        module=workload.model,
        scheduler=_scheduler(workload),
        clip=sync.clip_grad_norm_,
        flush=sync.flush,
        leave=sync.remove,
        engine=sync.engine,
        sparse=not traits(sync.scheme.collective).dense,
        scheme=lambda: sync.scheme,
        kfac=sync.kfac,
    )


def alone(workload: Workload) -> Contestant:
    """Nobody to average with: the compute that the others are held against."""
    return _plain("compute alone", workload, workload.model, 0.0)


def ring_bytes(workload: Workload, size: int, dtype: torch.dtype | None) -> float:
    """What a rank sends in one ring all-reduce of all gradients: 2 (P - 1) / P of them.

    `dtype` is what travels, None for each gradient's own type.
    """
    gradients = [p for p in workload.model.parameters() if p.requires_grad]
    wire = sum(p.numel() * (dtype or p.dtype).itemsize for p in gradients)
    return 2 * (size - 1) / size * wire


def _ddp(name: str, workload: Workload, size: int) -> Contestant:
    module = DistributedDataParallel(
        workload.model, gradient_as_bucket_view=True, static_graph=True
    )
    dtype = BASELINES[name][1]
    if dtype is not None:
        module.register_comm_hook(None, casting(dtype))
    return _plain(name, workload, module, ring_bytes(workload, size, dtype))


def _plain(
    name: str, workload: Workload, module: nn.Module, payload_bytes: float
) -> Contestant:
    parameters = list(workload.model.parameters())
    return Contestant(
        name=name,
        schedule=WFBP,
        workload=workload,
        module=module,
        scheduler=_scheduler(workload),
        clip=partial(nn.utils.clip_grad_norm_, parameters),
        flush=lambda: None,
        leave=lambda: None,
        payload_bytes=payload_bytes,
    )


def _scheduler(workload: Workload) -> LRScheduler | None:
    return workload.scheduler and workload.scheduler(workload.optimizer)
