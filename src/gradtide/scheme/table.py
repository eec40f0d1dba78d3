"""A table whose values are made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TypeVar

T = TypeVar("T")


class Table(Mapping[str, T]):
    """Values by name, each made once: who looks for names alone loads nothing.

    `makers` say how, in the order in which names are listed.
    """

    def __init__(self, makers: Mapping[str, Callable[[], T]]) -> None:
        self._makers = {name: cache(make) for name, make in makers.items()}

    def __getitem__(self, name: str) -> T:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
