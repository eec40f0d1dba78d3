"""What is found by trying out an optimizer of torch's is found once, not on every rank.

To try one out takes longer than most tests train, and what is found follows from what
the optimizer is. Optimizers of others, and ones that have stepped, are always tried
out, as are all with `pytest --whole`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradtide.runtime.optimizer import probing
from gradtide.runtime.optimizer.deferred_step import own_step
from gradtide.runtime.optimizer.optimizer_copy import BLOCK

FOUND: dict[str, Any] = {}  # by what was asked, and of what
WHOLE: list[bool] = []  # not empty: nothing is remembered


def remember() -> None:
    """From now on, in this process, what is found is remembered."""
    if WHOLE:
        return
    check_deferrable, probe = probing.check_deferrable, probing.probe

    def deferrable(optimizer: Optimizer) -> None:
        _once("deferrable", optimizer, lambda: check_deferrable(optimizer))

    def traits(optimizer: Optimizer) -> dict[Tensor, probing.Traits]:
        params = _params(optimizer)

        def find() -> list[probing.Traits]:
            found = probe(optimizer)
            return [found[p] for p in params]

        return dict(zip(params, _once("traits", optimizer, find), strict=True))

    instead = {check_deferrable: deferrable, probe: traits}
    for name, module in [*sys.modules.items()]:
        if name.startswith("gradtide."):
            for own, value in [*vars(module).items()]:
                if isinstance(value, FunctionType) and value in instead:
                    setattr(module, own, instead[value])


def _once(what: str, optimizer: Optimizer, find: Callable[[], Any]) -> Any:
    name = _described(optimizer)
    if name is None:
        return find()
    key = f"{what} {name}"
    if key not in FOUND:
        FOUND[key] = find()
    return FOUND[key]


def _params(optimizer: Optimizer) -> list[Tensor]:
    groups = optimizer.param_groups
    return list(dict.fromkeys(p for group in groups for p in group["params"]))


def _described(optimizer: Optimizer) -> str | None:
    """All that trying it out depends on; None: it has to be tried out."""
    kind = type(optimizer)
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    ordinary = torch.get_default_dtype() is torch.float32 and not modes
    if not kind.__module__.startswith("torch.optim.") or optimizer.state:
        return None
    places = {p: i for i, p in enumerate(_params(optimizer))}  # one may come twice
    told: list[Any] = [kind, id(own_step(kind)), torch.is_grad_enabled()]
    for name, value in vars(optimizer).items():
        if isinstance(value, bool | int | float | str | tuple | None):
            told.append((name, value))
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if not k.startswith("param")}
        ordinary = ordinary and not any(isinstance(v, Tensor) for v in options.values())
        told.append(options)
        for p in group["params"]:
            told.append((places[p], type(p), p.dim(), p.numel() >= BLOCK))
            told.append((p.dtype, p.device, p.requires_grad))
    return repr(told) if ordinary else None
