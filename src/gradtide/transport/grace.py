"""Ranks that wait ask slower ones, in the store of a generation, to end their round.

A thread of each rank's own does all of it, over a connection of its own. While the rank
trains it looks, ten times in a grace, whether others wait; while the rank waits, it
counts the seconds, and asks when they are over. So no message is sent in a step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed.distributed_c10d import PrefixStore

from gradtide.core.transport import CommunicationError
from gradtide.transport.generations import MEETING, is_gone, reach

LOOKS = 10  # in a grace
SHORTEST, LONGEST = 0.02, 5.0  # seconds between two looks
ANSWER = 5.0  # seconds for the store to answer, where the thread is to end


@dataclass
class Wait:
    """This rank waits for others: for which exchange, where, and since when."""

    exchange: int
    position: int
    idle: Callable[[], bool]
    since: float
    told: bool = False


@dataclass
class Generation:
    """Ranks that train together, as this one's thread and its training see them."""

    name: str
    address: str
    exchange: int = 0  # that comes next
    wait: Wait | None = None
    heard: tuple[int, int] = (-1, 0)  # an exchange, and the position in the round
    store: PrefixStore | None = None  # the thread's


class StoreGrace:
    """A grace of some seconds, in generations that follow each other."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._pause = min(max(seconds / LOOKS, SHORTEST), LONGEST)
        self._now: Generation | None = None
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, name: str, address: str) -> None:
        """Have a generation begin, whose first rank's store is there."""
        self._now = Generation(name, address)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="gradtide grace", daemon=True
            )
            self._thread.start()

    def rest(self) -> None:
        """Look and ask no more, until another generation begins."""
        self._now = None

    def close(self) -> None:
        """End the thread."""
        self._closed, self._now = True, None
        self._wake.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(ANSWER)

    # - The thread that trains ---------------------------------------------------------

    @property
    def asked(self) -> int | None:
        now = self._now
        if now is None or now.heard[0] != now.exchange:
            return None
        return now.heard[1]

    @contextmanager
    def waiting(self, position: int, idle: Callable[[], bool]) -> Iterator[None]:
        now = self._now
        if now is None:
            yield
            return
        wait = now.wait = Wait(now.exchange, position, idle, time.monotonic())
        try:
            yield
        except CommunicationError:
            # Ranks have to meet anew: those in the middle of a round need not end it.
            wait.idle, wait.since = _always, -math.inf
            self._wake.set()
            raise
        now.wait = None
        now.exchange += 1

    # - The thread that looks ----------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed:
            self._wake.wait(self._pause)
            self._wake.clear()
            if (now := self._now) is not None:
                try:
                    self._look(now)
                except (RuntimeError, ValueError, OSError):
                    now.store = None  # is gone, perhaps with its rank: ranks meet anew

    def _look(self, now: Generation) -> None:
        """Ask slower ranks if it is time, or hear if others wait."""
        wait, exchange = now.wait, now.exchange
        if wait is not None:
            if not wait.idle():
                wait.since = time.monotonic()
            late = time.monotonic() - wait.since >= self.seconds
            if late and not wait.told:
                self._store(now).set(_key(wait.exchange), str(wait.position))
                wait.told = True
        elif now.heard[0] != exchange and self._store(now).check([_key(exchange)]):
            told = self._store(now).get(_key(exchange))
            now.heard = exchange, int(told)

    def _store(self, now: Generation) -> PrefixStore:
        """A connection of this thread's own; an error if nobody is there."""
        if now.store is None:
            if is_gone(now.address):  # before torch says so at length
                raise OSError(now.address)
            # A look-up of a name may take seconds at first.
            store = reach(now.address, max(MEETING))
            now.store = PrefixStore(f"grace {now.name}", store)
        return now.store


def _key(exchange: int) -> str:
    return f"end {exchange}"


def _always() -> bool:
    return True
