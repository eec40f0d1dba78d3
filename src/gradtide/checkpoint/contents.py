"""What is saved of a run beside its replica: copies, the user's own items, randomness.

A copy is made on the thread that trains, so that training can go on while it is
written. It consists of tensors in host memory, numbers, texts and containers of these:
whatever else an item holds could not be read again without executing what is in a file.
"""

from __future__ import annotations

import numbers
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

PLAIN = str, bytes, type(None), torch.Size, torch.dtype, complex
DICTIONARIES: dict[Any, Any] = {Counter: Counter, OrderedDict: OrderedDict}
SEQUENCES: tuple[Any, ...] = tuple, list, set
Random: TypeAlias = dict[str, Any]


@runtime_checkable
class Stateful(Protocol):
    """What knows its own state: a learning-rate scheduler, a GradScaler, a sampler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def copied(value: Any, place: str, known: dict[Any, Tensor] | None = None) -> Any:
    """A copy that shares nothing with `value`; of a tensor in host memory.

    Tensors that are one in memory (tied weights) stay one. Raises TypeError, with the
    `place`, for what could not be read again.
    """
    known = {} if known is None else known
    if isinstance(value, Tensor):
        plain = value.detach()
        if type(plain) is not Tensor or not plain.numel():  # in no memory of its own
            return plain.to("cpu", copy=True)
        where = plain.data_ptr(), plain.dtype, plain.shape, plain.stride()
        if where not in known:
            known[where] = plain.to("cpu", copy=True)
        return known[where]
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        copies = {
            copied(key, f"a key of {place}"): copied(each, f"{place}[{key!r}]", known)
            for key, each in value.items()
        }
        return DICTIONARIES.get(type(value), dict)(copies)
    for kind in SEQUENCES:
        if isinstance(value, kind):
            return kind(copied(each, f"{place}[...]", known) for each in value)
    own = type(value)
    raise TypeError(
        f"{place} is a {own.__module__}.{own.__qualname__}, which cannot be saved: of "
        "a state come back tensors, numbers, texts, and lists and dictionaries of these"
    )


class Items:
    """The user's own things, by name: each with a state, a generator, or a callable.

    Attributes:
        values: What callables returned when the state was saved that was loaded last.
    """

    def __init__(self, items: Mapping[str, Any]) -> None:
        for name, item in items.items():
            known = isinstance(item, Stateful | torch.Generator) or callable(item)
            if not known or isinstance(item, type):
                raise TypeError(
                    f"{name} is a {type(item).__name__}: pass what has state_dict() "
                    "and load_state_dict(), a torch.Generator, or a callable that "
                    "returns a value: lambda: epoch"
                )
        self._items = dict(items)
        self.values: dict[str, Any] = {}

    def of(self, kind: type) -> list[Any]:
        """Those of a kind, by name."""
        named = sorted(self._items.items())
        return [item for _, item in named if isinstance(item, kind)]

    def copies(self) -> dict[str, Any]:
        """What is saved of each, as copies."""
        return {name: copied(_state(item), name) for name, item in self._items.items()}

    def check(self, saved: Any) -> None:
        """Raise ValueError for a state that has other items."""
        if not isinstance(saved, dict) or saved.keys() != self._items.keys():
            have = sorted(map(str, saved)) if isinstance(saved, dict) else "none"
            raise ValueError(
                f"the state has the items {have}, and this Checkpointer "
                f"{sorted(self._items)}: pass the same ones"
            )
        for name, item in self._items.items():
            if isinstance(item, torch.Generator) and not isinstance(
                saved[name], Tensor
            ):
                raise ValueError(f"the state of {name} is none of a torch.Generator")

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load each; ValueError, with its name, where one does not take its state."""
        for name, item in self._items.items():
            state = saved[name]
            try:
                if isinstance(item, torch.Generator):
                    item.set_state(state)
                elif isinstance(item, Stateful):
                    item.load_state_dict(state)
                else:
                    self.values[name] = state
            except Exception as error:  # of whatever kind its own code raises
                raise ValueError(
                    f"{name} does not take its state ({type(error).__name__}: {error})"
                ) from error


def _state(item: Any) -> Any:
    if isinstance(item, torch.Generator):
        return item.get_state()
    return item.state_dict() if isinstance(item, Stateful) else item()


def random_states(device: torch.device) -> Random:
    """The states of this process's random numbers; of NumPy's if that is imported."""
    found: Random = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = [
            kind,
            torch.tensor(keys.tolist(), dtype=torch.int64, device="cpu"),
            *rest,
        ]
    return found


def check_random(saved: Any) -> None:
    """Raise ValueError for what are no states of random numbers."""
    try:
        _set(saved, torch.Generator().set_state, random.Random().setstate)
        if "numpy" in saved:
            import numpy

            numpy.random.RandomState().set_state(_of_numpy(saved["numpy"]))
    except Exception as error:
        raise ValueError(
            f"the state of random numbers is none ({type(error).__name__}: {error})"
        ) from error


def set_random(saved: Random, device: torch.device) -> None:
    """Go on with the random numbers of a state that was checked."""
    _set(saved, torch.set_rng_state, random.setstate)
    if "device" in saved and device.type == "cuda":
        torch.cuda.set_rng_state(saved["device"], device)
    if "numpy" in saved:
        import numpy

        numpy.random.set_state(_of_numpy(saved["numpy"]))


def _set(
    saved: Random, torchs: Callable[[Tensor], Any], pythons: Callable[[Any], None]
) -> None:
    torchs(saved["torch"])
    version, numbers, gauss = saved["python"]
    pythons((version, tuple(numbers), gauss))


def _of_numpy(saved: Any) -> tuple[Any, ...]:
    kind, keys, *rest = saved
    return (kind, keys.numpy().astype("uint32"), *rest)
