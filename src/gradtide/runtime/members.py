"""Who else trains: what a training asks about ranks that ran out of batches.

Inside `join()` a `Member` (`join`) answers; outside of it nobody has run out, and no
word is sent.
"""

from __future__ import annotations

from typing import Any, Protocol

from gradtide.core.step import Event


class Members(Protocol):
    """The ranks that train, as a replica's training sees them.

    Attributes:
        inside: Whether this is inside `join()`.
        counts: Whether a rank that has run out counts in the mean, with zeros.
        shadowing: Whether this rank has no batch, and does its part of others' events.
        source: The first rank that still trains.
    """

    inside: bool

    @property
    def counts(self) -> bool: ...

    @property
    def shadowing(self) -> bool: ...

    @property
    def source(self) -> int: ...

    def count(self) -> int | None:
        """How many ranks train, by what all have said last; None for all of them."""

    def announce(self, event: Event, number: float = 0.0) -> float:
        """Say what this replica exchanges next; returns the number to go by."""

    def begin(self) -> None:
        """A forward begins: an error if some rank has run out and that is to be one."""

    def end(self) -> None:
        """Say that a backward ends."""

    def send_parameters(self) -> None:
        """Have ranks that joined follow a step that they could not take themselves."""

    def follow(self, training: Any) -> None:
        """Go on with the training that takes the place of the one so far."""


class Everybody:
    """Outside of `join()`: all ranks have batches."""

    inside, counts, shadowing, source = False, True, False, 0

    def count(self) -> int | None:
        return None

    def announce(self, event: Event, number: float = 0.0) -> float:
        return number

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def send_parameters(self) -> None: ...

    def follow(self, training: Any) -> None: ...


EVERYBODY = Everybody()
