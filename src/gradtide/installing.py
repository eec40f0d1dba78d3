"""gradtide's class in the place of torch's, for programs that name torch's."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from torch.nn.parallel import DistributedDataParallel as Torchs

from gradtide.parallel import DistributedDataParallel, Recipe, joined_class
from gradtide.scheme import as_scheme


def install(scheme: Recipe = "wfbp") -> ExitStack:
    """Put gradtide's class in the place of torch's DistributedDataParallel.

    It is for programs that name torch's class, or use frameworks that do: it is
    replaced in torch and in all modules that have imported it, and what is made of
    torch's own class by who has kept it is gradtide's, too. So are models of classes
    that derive from it, whenever these were defined. `isinstance` holds with either
    class. It takes effect at once, and lasts until what is returned is closed.

    Models that were made before keep torch's exchange, and there is a warning. So does
    what is made in other processes: see `gradtide run`.

    Args:
        scheme: What `DistributedDataParallel` uses where no `scheme` is passed.

    Returns:
        A context manager that puts everything back when it is left, or by `close()`.
            Models that were made inside stay gradtide's.

    Raises:
        ValueError: There is no such scheme.
    """
    chosen = as_scheme(scheme)
    made = [one for one in gc.get_objects() if issubclass(type(one), Torchs)]
    before = [type(one).__name__ for one in made if "reducer" in vars(one)]
    if before:
        kinds = ", ".join(sorted({*before}))
        warnings.warn(
            f"{len(before)} models ({kinds}) were wrapped before gradtide.install(), "
            "and keep torch's exchange: call it earlier",
            stacklevel=2,
        )
    places = [
        (DistributedDataParallel, "default_scheme", chosen),
        (Torchs, "__init__", _becomes_ours),
        *_places(),
    ]
    undo = ExitStack()
    for place, name, value in places:
        undo.callback(setattr, place, name, getattr(place, name))
        setattr(place, name, value)
    return undo


def _becomes_ours(self: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor of torch's class, and of what derives from it, once installed."""
    if not isinstance(self, DistributedDataParallel):
        self.__class__ = joined_class(type(self))  # type: ignore[arg-type]  # it is hashable
    DistributedDataParallel.__init__(self, *args, **kwargs)


def _places() -> Iterator[tuple[Any, str, Any]]:
    """Where programs find torch's class; torch's other modules only ask for it.

    Modules that derive a class from it keep it, as they call its methods by that name
    (`super(DistributedDataParallel, self)`): what they make of it is ours anyway.
    """
    own = __name__, "gradtide.parallel", "gradtide.runtime.guards.validation"
    public = ("torch.nn.parallel", "torch.nn.parallel.distributed")
    for module_name, module in list(sys.modules.items()):
        asking = module_name.startswith("torch.") and module_name not in public
        if asking or module_name in own or not isinstance(module, ModuleType):
            continue
        if module_name not in public and _derives(module):
            continue
        for name, value in list(vars(module).items()):
            if value is Torchs:
                yield module, name, DistributedDataParallel


def _derives(module: ModuleType) -> bool:
    """Whether a class is defined there that derives from torch's."""
    classes = [one for one in vars(module).values() if isinstance(one, type)]
    derived = [one for one in classes if issubclass(one, Torchs) and one is not Torchs]
    return any(one.__module__ == module.__name__ for one in derived)
