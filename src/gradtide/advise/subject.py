"""Which modules a program trains, by those that it calls and what an optimizer has."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class Called:
    """The modules that were called, in the order of their first calls; none is kept."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[nn.Module]] = {}

    def add(self, module: nn.Module) -> int:
        """Returns how many there are."""
        known = self._known.get(id(module))
        if known is None or known() is not module:
            self._known[id(module)] = weakref.ref(module)
        return len(self._known)

    def __iter__(self) -> Iterator[nn.Module]:
        found = (known() for known in self._known.values())
        return (module for module in found if module is not None)


def trained(optimizer: Optimizer) -> list[nn.Parameter]:
    """What an optimizer steps that has gradients."""
    every = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in every if p.requires_grad]


def numel(optimizer: Optimizer) -> int:
    return sum(p.numel() for p in trained(optimizer))


def wrappers(called: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """Torch's, and gradtide's, which is one of torch's."""
    return [m for m in called if isinstance(m, DistributedDataParallel)]


def outermost(called: Iterable[nn.Module], optimizer: Optimizer) -> list[nn.Module]:
    """Modules that have what an optimizer steps and are inside no other that was
    called, in the order of their calls. A DistributedDataParallel is none.
    """
    params = {id(p) for p in trained(optimizer)}
    modules = [m for m in called if not isinstance(m, DistributedDataParallel)]
    inside = {id(child) for m in modules for child in m.modules() if child is not m}
    return [
        module
        for module in modules
        if id(module) not in inside
        and any(id(p) in params for p in module.parameters())
    ]


def whole(tops: Sequence[nn.Module], optimizer: Optimizer) -> nn.Module:
    """One module that has all of `tops`, and what else the optimizer steps."""
    there = {id(p) for top in tops for p in top.parameters()}
    rest = [p for p in trained(optimizer) if id(p) not in there]
    if len(tops) == 1 and not rest:
        return tops[0]
    lone = [nn.ParameterList(rest)] if rest else []
    return nn.ModuleList([*tops, *lone])
