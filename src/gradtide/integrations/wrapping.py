"""What a framework hands to the wrappers of its modules: a scheme, and optimizers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product

from torch.optim import Optimizer

from gradtide.parallel import SCHEME, DistributedDataParallel
from gradtide.scheme import Scheme


def scheme_or_default(scheme: str | Scheme | None) -> str | Scheme:
    """The scheme itself; for None that of the environment, or "wfbp"."""
    return os.environ.get(SCHEME, "wfbp") if scheme is None else scheme


def introduce(
    models: Iterable[DistributedDataParallel], optimizers: Iterable[Optimizer]
) -> None:
    """Hand models whose scheme waits for their optimizer the one of their parameters.

    This is a collective call, before training. An optimizer that is not among these is
    found when it steps, but it is too late then to load what ranks have saved.
    """
    for model, optimizer in product(models, optimizers):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        if model.replica.waiting and trained <= held:
            model.attach(optimizer)
