"""Parameters whose update is due, for whoever reads them before their module runs.

[Note: due] While its update is due, a parameter is of a private class. Whatever is done
to it then comes by `__torch_function__`, which has the update carried out first; shape,
dtype and the like are told without. It costs nothing where nobody reads. The class is
taken off before the update, so modules, optimizers, copies and files never have it.

[Note: grad] Every step asks each parameter for `.grad`, and torch's own would come by
`__torch_function__`, too. So while a parameter is due, `.grad` is an attribute of
Python's, from `begin_due` to `end_due`.

[Note: aliases] A tensor that shares a parameter's memory, and was made before, is read
past that class: a `p.data` that was kept, a flat view of all parameters, another
parameter. Torch counts who shares a storage, and where that is anybody who is not known
here, the update is not deferred.

[Note: forks] A process that is forked has the memory of this one and none of its
threads: what is due there never comes. So updates are applied before a fork. What it
asks of other ranks itself fails (`transport.comm_queue`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor, nn

from gradtide.core.torch_internals import (
    HOOK_TABLES,
    storage_address,
    storage_references,
    tree_leaves,
)

Kind = type[nn.Parameter]

# What says nothing of values; all else reads or writes them.
_TOLD = (
    *("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "is_cuda"),
    *("is_cpu", "is_sparse", "is_meta", "itemsize", "nbytes", "output_nr"),
    *HOOK_TABLES,
)
_CALLED = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device"),
    *("stride", "is_contiguous", "is_floating_point", "is_complex", "is_shared"),
    *("requires_grad_", "retain_grad", "register_hook"),
    "register_post_accumulate_grad_hook",
)
METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _TOLD),
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        *(getattr(Tensor, name) for name in _CALLED),
    ]
)


def due_kind(p: nn.Parameter, update: Callable[[nn.Parameter], None]) -> Kind | None:
    """The class of parameters like this one while they are due, see [Note: due].

    None if they can have no other. `update` carries out the update of one of them.
    """
    plain = type(p)
    due = _due(plain, update)
    try:
        p.__class__ = due
    except TypeError:  # its memory is laid out in another way
        return None
    finally:
        p.__class__ = plain
    return due


def begin_due(p: nn.Parameter, due: Kind) -> None:
    """Give a parameter the class of those that are due."""
    grad = p.grad
    if grad is not None:
        p.grad = None
    p.__class__ = due
    if grad is not None:
        p.grad = grad


def end_due(p: nn.Parameter, plain: Kind) -> Tensor | None:
    """Give a parameter its own class again.

    Returns a gradient that backward has made meanwhile: it is not in `.grad` any more,
    which is what the program has seen.
    """
    p.__class__ = plain
    made, seen = p.grad, vars(p).pop("grad", None)
    if made is not seen:
        p.grad = seen
    return made


def _due(plain: Kind, update: Callable[[nn.Parameter], None]) -> Kind:
    def up_to_date(p: nn.Parameter) -> nn.Parameter:
        update(p)
        if type(p) is DueParameter:
            p.__class__ = plain  # type: ignore[assignment]  # also of one that is read while it is updated
        return p

    class DueParameter(plain):  # type: ignore[misc, valid-type]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in METADATA:
                told: Any = plain.__torch_function__
                return told(func, types, args, kwargs or {})
            # Any: another thread may be just taking the class off, and updating.
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    up_to_date(leaf)
            return func(*args, **(kwargs or {}))

        grad = None  # see [Note: grad]

        # These two ask for the class before they read.
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return copy.deepcopy(up_to_date(self), memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            plainly: Any = up_to_date(self).__reduce_ex__
            return plainly(protocol)

    return DueParameter


class Aliases:
    """Who else shares the memory of some parameters, see [Note: aliases].

    Hot path: every parameter is looked at in every step.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(params)
        self._addresses: list[int] = []

    def find(self) -> list[nn.Parameter]:
        """The parameters with memory that something else can read."""
        if [p.data_ptr() for p in self._params] != self._addresses:
            self._look()
        counts = list(map(storage_references, self._pointers))
        if counts == self._expected:
            return []
        rows = zip(counts, self._expected, self._sharing, strict=True)
        odd = (sharing for count, expected, sharing in rows if count != expected)
        return [p for sharing in odd for p in sharing]

    def _look(self) -> None:
        """Note where the parameters are, and how many share each storage."""
        self._addresses = [p.data_ptr() for p in self._params]
        # Kept, lest an address come to stand for another storage.
        self._storages = [p.untyped_storage() for p in self._params]
        by_pointer: dict[int, list[nn.Parameter]] = {}
        for p, storage in zip(self._params, self._storages, strict=True):
            by_pointer.setdefault(storage_address(storage), []).append(p)
        self._pointers = list(by_pointer)
        self._sharing = list(by_pointer.values())
        # One more for what is kept here; of those that can't be told apart none fits.
        self._expected = [
            0 if _overlap(sharing) or _shared(sharing[0]) else 1 + len(sharing)
            for sharing in self._sharing
        ]


def _overlap(sharing: Sequence[nn.Parameter]) -> bool:
    """Whether parameters have some of their memory in common."""
    ends = sorted((p.data_ptr(), p.data_ptr() + _span(p)) for p in sharing)
    return any(end > begin for (_, end), (begin, _) in pairwise(ends))


def _span(p: Tensor) -> int:
    """Bytes from a parameter's first element to its last."""
    steps = zip(p.size(), p.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if p.numel() else -1
    return (last + 1) * p.element_size()


def _shared(p: Tensor) -> bool:
    """Whether other processes can read the memory."""
    return p.device.type == "cpu" and p.untyped_storage().is_shared()


# - Forks ---------------------------------------------------------------------------


class Flushed(Protocol):
    """What has updates that may be due."""

    def flush(self) -> None:
        """Apply all that is due."""


_forked = WeakSet[Flushed]()


def watch(training: Flushed) -> None:
    """Have its updates applied before this process forks: see [Note: forks]."""
    _forked.add(training)
    _register()


@cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(before=_flush)


def _flush() -> None:
    for training in list(_forked):
        with suppress(Exception):  # whoever waits for it next is told
            training.flush()
