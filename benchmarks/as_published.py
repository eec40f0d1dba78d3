"""Collectives that send as many bytes as their papers say.

The papers of sparse schemes count an index as a value of two bytes, and `TopKA2A`'s
sends its mean with all zeros. gradtide's are shorter. What is held against a paper's
own arithmetic is one of these instead: the same algorithm, with longer messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from gradtide.collectives._nonzero import NonZero
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Collective, Payload
from gradtide.wire.indices import Indices

WORD = 2  # bytes of an index


@contextmanager
def longer(indices: bool = True) -> Iterator[None]:
    """Inside, zeros of a mean travel, and `indices` take WORD bytes each."""
    shorter, pays = Indices.sizes, NonZero.pays

    def sizes(self: Indices) -> list[int]:
        low, row = shorter.fget(self)  # type: ignore[attr-defined]
        return [max(WORD * self.room - row, low), row]

    if indices:
        Indices.sizes = property(sizes)  # type: ignore[assignment]
    NonZero.pays = property(lambda self: False)  # type: ignore[assignment]
    try:
        yield
    finally:
        Indices.sizes, NonZero.pays = shorter, pays  # type: ignore[method-assign]


@cache
def as_published(kind: Any, indices: bool = True) -> Any:
    """The kind of collective, with messages as long as the paper's.

    Without `indices` these are gradtide's own.
    """

    def lengthened(flow: Flow) -> Flow:
        answer = None
        while True:
            with longer(indices):
                try:
                    asked = flow.send(answer)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
            answer = yield asked

    @dataclass(frozen=True)
    class Published(kind):  # type: ignore[misc]
        def reduce(self, payload: Payload, group: Group) -> Flow:
            return lengthened(kind.reduce(self, payload, group))

    found: type[Collective] = Published
    return found
