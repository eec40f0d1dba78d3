"""Which of a module's parameters and buffers the ranks have in common.

DistributedDataParallel leaves alone what a module names in the attribute
`_ddp_params_and_buffers_to_ignore`. So does everything here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from gradtide.core.torch_internals import ignored_by_ddp, tables


def shared_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are the same on all ranks, by name."""
    ignored = _ignored(model)
    return ((n, p) for n, p in model.named_parameters() if n not in ignored)


@contextmanager
def thawed(params: Iterable[Tensor]) -> Iterator[None]:
    """Parameters require gradients inside, also those that are frozen."""
    frozen = [p for p in params if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def averaged(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose gradients are averaged, by name."""
    return [(name, p) for name, p in shared_parameters(model) if p.requires_grad]


def paths(model: nn.Module) -> dict[str, nn.Module]:
    """A model's modules by all of their names, of which some have several.

    One that is inside itself, as where a model keeps its own wrapper, is entered once.
    """
    found: dict[str, nn.Module] = {}

    def enter(module: nn.Module, name: str, above: frozenset[int]) -> None:
        if id(module) in above:
            return
        found[name] = module
        children, _ = tables(module)
        for own, child in children.items():
            if child is not None:
                enter(child, f"{name}.{own}".lstrip("."), above | {id(module)})

    enter(model, "", frozenset())
    return found


def shared_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that rank 0 has for all ranks, by name."""
    ignored = _ignored(model)
    return [(name, b) for name, b in model.named_buffers() if name not in ignored]


def is_ignored(model: nn.Module, name: str) -> bool:
    """Whether what has a name stays each rank's own."""
    return name in _ignored(model)


def _ignored(model: nn.Module) -> frozenset[str]:
    return frozenset(ignored_by_ddp(model))
