"""What the engine needs of a transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol

from gradtide.core.ops import Group, Op


@dataclass
class Progress:
    """How far this rank's training has come, for peers that wait for it."""

    steps: int = 0  # that the optimizer has taken
    trainer: int = field(default_factory=get_ident)  # the thread that trains

    def may_train(self) -> bool:
        """Whether this thread trains, or there was no step yet to tell by."""
        return not self.steps or self.trainer == get_ident()


class CommunicationError(RuntimeError):
    """An exchange failed: a peer died, stalled past the timeout, or asked otherwise."""


@dataclass(frozen=True)
class Job:
    """A piece of work for a transport's queue.

    `begin` is the part that does not wait: it may run early, while all that is left of
    the work before it is waiting.

    Where links inside and between hosts can be busy at the same time, `before` and
    `after` are what there is to do inside. Each of the three runs in the order of
    submission, and beside the other two: a job's `before` beside the `work` of earlier
    ones, its `after` beside that of later ones. A job that is `settled` works when all
    earlier ones are through, with what they do after, too.

    `advance` goes on as far as that needs no waiting, once it has begun: it is told how
    to ask whether what was issued is answered. Where messages are long under way, this
    is called while earlier work waits.

    `filled` tells whether a device is done with what is worked on: nothing begins early
    that would wait for that.
    """

    begin: Callable[[], None]
    work: Callable[[], None]
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    settled: bool = False
    name: str = ""  # what it is for: the same on every rank
    filled: Callable[[], bool] = lambda: True
    advance: Callable[[Callable[[Any], bool]], None] = lambda here: None


class Ticket(Protocol):
    """A job that was submitted to a queue."""

    def join(self) -> None:
        """Return when what follows may rely on the work; raise what the work raised."""

    def done(self) -> bool:
        """Whether nothing, on a device either, would wait in or behind `join`."""


class Transport(Protocol):
    """Answers requests, on a queue of its own.

    Invariant: work runs strictly in the order of submission, so the order of requests
    on the wire is a function of the program alone (guard: tests/core/test_engine.py).
    `issue` and `wait` are called from submitted work only; `issue` does not wait.
    """

    group: Group
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each, by their first
    progress: Progress

    @property
    def delay(self) -> float:
        """Seconds to another host, if ways to answer are chosen by them, or 0."""
        ...

    @property
    def payload_bytes(self) -> int:
        """Bytes that this rank has sent since it was connected."""
        ...

    def submit(self, job: Job) -> Ticket: ...
    def carried(self, total: float, largest: float, smallest: float) -> float:
        """Bytes that a link passes while parts are summed, each for its owner.

        The arguments are bytes of the parts, of which there is one for each rank.
        """
        ...

    def issue(self, op: Op) -> Any: ...
    def wait(self, pending: Any) -> Any: ...
    def gather_objects(self, value: Any, name: str = "comparing") -> list[Any]:
        """The `value` of all ranks, in order; this blocks, and is for set-up only.

        Raises CommunicationError where ranks ask for different things.
        """
        ...

    def close(self) -> None: ...
    def abandon(self) -> None:
        """Close, where ranks are lost: wait for nobody, and tell nobody."""
