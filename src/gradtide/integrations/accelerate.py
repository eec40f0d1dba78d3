"""gradtide in the place of DistributedDataParallel in Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from gradtide import installing
from gradtide.integrations import states
from gradtide.integrations.wrapping import introduce, scheme_or_default
from gradtide.parallel import DistributedDataParallel
from gradtide.replica import Replica
from gradtide.scheme import Scheme


def install(scheme: str | Scheme | None = None) -> ExitStack:
    """Have every `Accelerator` train by a scheme of gradtide's. Local.

    Call it before `accelerator.prepare(model, optimizer)`, on every rank. What
    `prepare` returns is used as ever: `accumulate`, `clip_grad_norm_`, `save_state` and
    `load_state`. In a checkpoint's folder every rank writes a file of its own into
    `gradtide/`: its residual, and what the scheme remembers.

    Args:
        scheme: What travels, in which buckets, and when, as for `gradtide.replicate`.
            None stands for the environment's GRADTIDE_SCHEME, or "wfbp".

    Returns:
        What undoes it, by `close()` or as a context manager. Models that were prepared
            stay as they are.
    """
    installed, prepared = ExitStack(), _Prepared()
    installed.enter_context(installing.install(scheme_or_default(scheme)))
    for name in ("prepare_model", "prepare", "save_state", "load_state"):
        patch(installed, Accelerator, name, getattr(prepared, name))
    return installed


class _Prepared:
    """The models that were wrapped, and what Accelerator's methods do about them."""

    def __init__(self) -> None:
        self._models: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def prepare_model(
        self, original: Any, accelerator: Any, *args: Any, **kw: Any
    ) -> Any:
        model = original(accelerator, *args, **kw)
        if isinstance(model, DistributedDataParallel):
            known = self._of(accelerator)
            known += [] if model in known else [model]
        return model

    def prepare(self, original: Any, accelerator: Any, *args: Any, **kw: Any) -> Any:
        prepared = original(accelerator, *args, **kw)
        introduce(self._of(accelerator), map(_bare, accelerator._optimizers))
        return prepared

    def save_state(self, original: Any, accelerator: Any, *args: Any, **kw: Any) -> Any:
        folder = original(accelerator, *args, **kw)
        states.save_all(replicas(self._of(accelerator)), f"{folder}/{states.FOLDER}")
        return folder

    def load_state(
        self, original: Any, accelerator: Any, *args: Any, **kw: Any
    ) -> None:
        found: list[Any] = []  # the folder, which Accelerate may choose itself
        keep = accelerator.register_load_state_pre_hook(lambda _, at: found.append(at))
        try:
            original(accelerator, *args, **kw)
        finally:
            keep.remove()
        states.load_all(replicas(self._of(accelerator)), f"{found[0]}/{states.FOLDER}")

    def _of(self, accelerator: Any) -> list[Any]:
        """Its models, without those that it has forgotten (`free_memory`)."""
        known = self._models.setdefault(accelerator, [])
        known[:] = [model for model in known if model.module in accelerator._models]
        return known


def replicas(models: Iterable[Any]) -> list[Replica]:
    """The replicas of those models that were wrapped."""
    wrapped = DistributedDataParallel
    return [model.replica for model in models if isinstance(model, wrapped)]


def patch(undo: ExitStack, kind: type, name: str, around: Callable[..., Any]) -> None:
    """Call `around(original, self, ...)` for a method, until `undo` is closed."""
    original = getattr(kind, name)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(kind, name, method)
    undo.callback(setattr, kind, name, original)


def _bare(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
