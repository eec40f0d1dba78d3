"""A thread that runs work in the order of submission.

[Note: The end of a program] Under `dear` the last update is still on its way when a
program ends without a `flush`. An interpreter that ends while a thread waits in Gloo
aborts the process. So it waits for what was submitted, unless the program failed: a
peer may then never answer. (Guard: tests/test_program_end.py.)
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

PATIENCE = 60.0  # seconds that the end of a program waits for the peers


class WorkItem:
    """A piece of work and its outcome; the ticket that its submitter holds.

    `begin` does what can be done without waiting, `work` the rest. `number` counts the
    items of a queue: the same item has the same number on every rank.
    """

    def __init__(
        self, number: int, begin: Callable[[], None], work: Callable[[], None]
    ) -> None:
        self.number, self.begin, self.work = number, begin, work
        self.requests = 0  # that it has issued so far
        self.begun = False
        self.error: BaseException | None = None
        # A bare lock, not an Event: that takes four turns of Python's own lock.
        self._working = threading.Lock()
        self._working.acquire()

    def join(self) -> None:
        with self._working:
            pass
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Let go of what the work held, and of those who wait."""
        self.begin = self.work = _nothing
        self._working.release()


class CommQueue:
    """The communication queue: it runs work items in order on a daemon thread.

    The first error ends the queue: what was submitted behind it never runs, because the
    peers may no longer agree on what comes next; all of it fails with that first error.
    """

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self.current = WorkItem(0, _nothing, _nothing)  # the one that begins or works
        self._count = 0
        self._items: deque[WorkItem | None] = deque()
        self._submitted: SimpleQueue[None] = SimpleQueue()  # one for each item
        # A daemon: a rank that fails must be able to exit while a peer has it waiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def submit(self, begin: Callable[[], None], work: Callable[[], None]) -> WorkItem:
        self._count += 1
        item = WorkItem(self._count, begin, work)
        self._items.append(item)
        self._submitted.put(None)
        return item

    def begin_next(self) -> None:
        """Begin the next item, if there is one.

        The work of the current one calls this when all that is left of it is waiting.
        """
        item = self._items[0] if self._items else None
        if item is not None and not item.begun and self.error is None:
            self._begin(item)

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        atexit.unregister(self._end)
        self._finish(None)

    def _end(self) -> None:
        """See [Note: The end of a program]; an error is told, not raised, there."""
        if getattr(sys, "last_value", None) is None:
            self._finish(PATIENCE)
            if self.error is not None:
                raise self.error

    def _finish(self, seconds: float | None) -> None:
        self._items.append(None)
        self._submitted.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._submitted.get()
            item = self._items.popleft()
            if item is None:
                return
            self._begin(item)
            self.current = item
            self.error = self.error or item.error
            if self.error is None:
                try:
                    item.work()
                except BaseException as error:  # the submitter's to handle, in join()
                    self.error = error
            item.error = self.error
            item.finish()

    def _begin(self, item: WorkItem) -> None:
        if item.begun or self.error is not None:
            return
        item.begun = True
        working, self.current = self.current, item
        try:
            item.begin()
        except BaseException as error:  # raised when the item's turn comes
            item.error = error
        self.current = working


def _nothing() -> None: ...
