"""A thread that runs work in the order of submission."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

PATIENCE = 3.0  # seconds after which who waits for an item asks what is the matter
STUCK = 2.0  # seconds to wait for a thread that nothing will wake, perhaps


class WorkItem:
    """A piece of work and its outcome; the ticket that its submitter holds.

    `begin` does what can be done without waiting, `work` the rest. `number` counts the
    items of a queue: the same item has the same number on every rank. `late` is called
    when somebody has waited for long: it says for how many more seconds to wait.
    """

    def __init__(
        self,
        number: int,
        begin: Callable[[], None],
        work: Callable[[], None],
        late: Callable[[], float],
    ) -> None:
        self.number, self.begin, self.work, self._late = number, begin, work, late
        self.requests = 0  # that it has issued so far
        self.begun = False
        self.error: BaseException | None = None
        # A bare lock, not an Event: that takes four turns of Python's own lock.
        self._working = threading.Lock()
        self._working.acquire()

    def join(self) -> None:
        patience = PATIENCE
        while not self._working.acquire(timeout=patience):
            patience = self._late()
        self._working.release()
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
    `late` is asked, by who waits, whether to wait on; what it raises is such an error.
    """

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self.late: Callable[[], float] = lambda: PATIENCE
        # The one that begins or works.
        self.current = WorkItem(0, _nothing, _nothing, self._late)
        self.submitted = 0  # items so far
        self._closed = False
        self._items: deque[WorkItem | None] = deque()
        self._waiting: SimpleQueue[None] = SimpleQueue()  # one for each item
        # A daemon: a rank that fails must be able to exit while a peer has it waiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, begin: Callable[[], None], work: Callable[[], None]) -> WorkItem:
        self.submitted += 1
        item = WorkItem(self.submitted, begin, work, self._late)
        self._items.append(item)
        self._waiting.put(None)
        return item

    def begin_next(self) -> None:
        """Begin the next item, if there is one.

        The work of the current one calls this when all that is left of it is waiting.
        """
        item = self._items[0] if self._items else None
        if item is not None and not item.begun and self.error is None:
            self._begin(item)

    def close(self, seconds: float | None = None) -> bool:
        """Finish what was submitted and end the thread; returns whether that is done.

        This waits so many seconds at most, and never long for a queue that failed.
        """
        if not self._closed:
            self._closed = True
            self._items.append(None)
            self._waiting.put(None)
        if self._thread is threading.current_thread():
            return True
        self._thread.join(STUCK if self.error is not None else seconds)
        return not self._thread.is_alive()

    def _late(self) -> float:
        """Somebody waits for long. Raises what ended the queue, or ends it now."""
        if self.error is None:
            try:
                return self.late()
            except BaseException as error:
                self.error = self.error or error
        raise self.error

    def _run(self) -> None:
        while True:
            self._waiting.get()
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
                    self.error = self.error or error
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
