"""What the engine needs of a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from gradtide.ops import Group, Op


class CommunicationError(RuntimeError):
    """An exchange failed: a peer died, stalled past the timeout, or asked otherwise."""


class Ticket(Protocol):
    """Work that was submitted to a lane."""

    def join(self) -> None:
        """Return when what follows may rely on the work; raise what the work raised."""


class Transport(Protocol):
    """Answers requests, on a lane of its own.

    Invariant: work runs strictly in the order of submission, so the order of requests
    on the wire is a function of the program alone (guard: tests/test_engine.py).
    `issue` and `wait` are called from submitted work only; `issue` does not wait.
    `begin` is the part of a submission that does not wait either: it may run early,
    while all that is left of the work before it is waiting.
    """

    group: Group

    @property
    def payload_bytes(self) -> int:
        """Sent by this rank since it was connected."""
        ...

    def submit(self, begin: Callable[[], None], work: Callable[[], None]) -> Ticket: ...
    def sends(self, op: Op) -> int:
        """Bytes of payload that answering `op` makes this rank send."""
        ...

    def carried(self, total: float, largest: float, smallest: float) -> float:
        """Bytes that a link passes while parts are summed, each for its owner.

        Of one part for each rank, of which these are the bytes.
        """
        ...

    def issue(self, op: Op) -> Any: ...
    def wait(self, pending: Any) -> Any: ...
    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's `value` in rank order; blocking, for set-up only."""
        ...

    def close(self) -> None: ...
