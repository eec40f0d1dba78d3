"""A thread that runs work in the order of submission."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Errand:
    """A piece of work and its outcome; the ticket that its submitter holds."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = threading.Event()
        self.error: BaseException | None = None

    def join(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class Lane:
    """Runs errands one after the other on a daemon thread.

    The first error ends the lane: what was submitted behind it never runs, because the
    peers may no longer agree on what comes next; all of it fails with that first error.
    """

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self._errands: SimpleQueue[Errand | None] = SimpleQueue()
        # A daemon: a rank that fails must be able to exit while a peer keeps it waiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> Errand:
        errand = Errand(work)
        self._errands.put(errand)
        return errand

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._errands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            if self.error is None:
                try:
                    errand.work()
                except BaseException as error:  # the submitter's to handle, in join()
                    self.error = error
            errand.error = self.error
            errand.work = _nothing  # drop the tensors that the work held
            errand.done.set()


def _nothing() -> None: ...
