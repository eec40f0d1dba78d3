"""Things that have something in common, together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor

K = TypeVar("K")
T = TypeVar("T")


def grouped(things: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Things by what `key` says of them, in the order in which they come."""
    found: dict[K, list[T]] = {}
    for thing in things:
        found.setdefault(key(thing), []).append(thing)
    return found


def alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype on one device together."""
    return [*grouped(tensors, lambda x: (x.dtype, x.device)).values()]
