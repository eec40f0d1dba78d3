"""A thread that runs work in the order of submission."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Errand:
    """A piece of work and its outcome; the ticket that its submitter holds.

    `begin` does what can be done without waiting, `work` the rest. `number` counts the
    errands of a lane: the same errand has the same number on every rank.
    """

    def __init__(
        self, number: int, begin: Callable[[], None], work: Callable[[], None]
    ) -> None:
        self.number, self.begin, self.work = number, begin, work
        self.requests = 0  # that it has issued so far
        self.begun = False
        self.error: BaseException | None = None
        self._done = threading.Event()

    def join(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Let go of what the work held, and of those who wait."""
        self.begin = self.work = _nothing
        self._done.set()


class Lane:
    """Runs errands one after the other on a daemon thread.

    The first error ends the lane: what was submitted behind it never runs, because the
    peers may no longer agree on what comes next; all of it fails with that first error.
    """

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self.current = Errand(0, _nothing, _nothing)  # the one that begins or works
        self._count = 0
        self._errands: deque[Errand | None] = deque()
        self._submitted = threading.Semaphore(0)
        # A daemon: a rank that fails must be able to exit while a peer has it waiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, begin: Callable[[], None], work: Callable[[], None]) -> Errand:
        self._count += 1
        errand = Errand(self._count, begin, work)
        self._errands.append(errand)
        self._submitted.release()
        return errand

    def begin_next(self) -> None:
        """Begin the next errand, if there is one.

        For the work of the current one to call when all that is left of it is waiting.
        """
        errand = self._errands[0] if self._errands else None
        if errand is not None and not errand.begun and self.error is None:
            self._begin(errand)

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._errands.append(None)
        self._submitted.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._submitted.acquire()
            errand = self._errands.popleft()
            if errand is None:
                return
            self._begin(errand)
            self.current = errand
            self.error = self.error or errand.error
            if self.error is None:
                try:
                    errand.work()
                except BaseException as error:  # the submitter's to handle, in join()
                    self.error = error
            errand.error = self.error
            errand.finish()

    def _begin(self, errand: Errand) -> None:
        if errand.begun or self.error is not None:
            return
        errand.begun = True
        working, self.current = self.current, errand
        try:
            errand.begin()
        except BaseException as error:  # raised when the errand's turn comes
            errand.error = error
        self.current = working


def _nothing() -> None: ...
