"""Threads that run work in the order of submission.

[Note: Patience] Linux does not let a thread that is scheduled as a batch interrupt
another when it wakes up. A lane that does so, at every piece that arrives, leaves the
training thread with a cold cache.

[Note: Frames] An error that was raised has the frames that it passed, and these have
model, optimizer and replica. A thread that knew it would keep them all, and itself, for
ever. So what is kept of an exchange's error was never raised, and each time that it is
told another one is (guard: tests/transport/test_fault.py).
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

from gradtide.core.transport import CommunicationError, Job

NOTHING = Job(lambda: None, lambda: None)
PATIENCE = 3.0  # seconds after which who waits for an item asks what is the matter
STUCK = 2.0  # seconds to wait for a thread that nothing will wake, perhaps


@dataclass(eq=False)
class WorkItem:
    """A job and its outcome; the ticket that its submitter holds.

    `number` counts the items of a queue: the same item has the same number on every
    rank. `late` is called when somebody has waited for long: it says for how many more
    seconds to wait.
    """

    number: int
    job: Job
    late: Callable[[], float]
    queue: str = ""  # its queue's name, as in `QUEUES`
    # How many it has issued so far, by the ranks that they were asked of.
    requests: Counter[Sequence[int]] = field(default_factory=Counter)
    begun: bool = False
    early: bool = False  # begun, while the one before it works
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.name = self.job.name
        self.digest = crc32(self.name.encode())
        self.ready = self.job.before is None  # for the main lane
        # Bare locks, not Events: these take four turns of Python's own lock.
        self.working, self.preparing = threading.Lock(), threading.Lock()
        self.working.acquire()
        if not self.ready:
            self.preparing.acquire()

    def join(self) -> None:
        patience = PATIENCE
        while not self.working.acquire(timeout=patience):
            patience = self.late()
        self.working.release()
        if self.error is not None:
            raise anew(self.error)

    def done(self) -> bool:
        return not self.working.locked()

    def finish(self, error: BaseException | None) -> None:
        """Let go of what the work held, and of those who wait."""
        self.error = error
        self.job = NOTHING
        self.working.release()


class _Lane:
    """A daemon thread that takes items in order, once there are any.

    A daemon: a rank that fails must be able to exit while a peer has it waiting.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[WorkItem], None],
        none: WorkItem,
        own: threading.local,
    ) -> None:
        self.items: deque[WorkItem | None] = deque()
        self.current = none  # the one that begins or works
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._take, self._waiting, self._own = take, SimpleQueue[None](), own

    def put(self, item: WorkItem | None) -> None:
        """Append an item; None ends the thread."""
        self.items.append(item)
        self._waiting.put(None)
        if self.thread.ident is None and item is not None:
            self.thread.start()

    def ended(self, seconds: float | None) -> bool:
        """Whether the thread has ended, after so many seconds of waiting at most."""
        if self.thread.ident is None or self.thread is threading.current_thread():
            return True
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def _run(self) -> None:
        self._own.lane = self
        _be_patient()
        while True:
            self._waiting.get()
            item = self.items.popleft()
            if item is None:
                return
            self._take(item)


class CommQueue:
    """The communication queue: it runs work items in order on daemon threads.

    [Note: Lanes] All work is done by the main lane, one item after the other. Where
    items have something to do inside the host before or after that, two more lanes do
    so, each in the same order: so links inside and between hosts are busy at the same
    time, and a lane waits for an earlier one only, never the other way round.

    The first error ends the queue: what was submitted behind it never runs, because the
    peers may no longer agree on what comes next; all of it fails with that first error.
    `late` is asked, by who waits, whether to wait on; what it raises is such an error.
    """

    def __init__(self, name: str, abreast: int) -> None:
        """`name`: the same on every rank, and on each of no other queue.

        `abreast`: how many items of the main lane may be under way at once.
        """
        self.name = name
        QUEUES[name] = self
        self.error: BaseException | None = None
        self.late: Callable[[], float] = lambda: PATIENCE
        self.submitted = 0  # items so far
        self._closed, self._abreast = False, abreast
        self._far = False  # see `suit_delay`
        self._here: Callable[[Any], bool] = lambda pending: False
        self._wake: Callable[[], None] | None = None
        self._advancing = False
        self._asking = threading.Lock()  # one of those who wait asks
        self._own = own = threading.local()  # the lane whose thread this is
        none = WorkItem(0, NOTHING, self._late)
        self._before = _Lane(f"{name} before", self._prepare, none, own)
        self._main = _Lane(name, self._run, none, own)
        self._after = _Lane(f"{name} after", self._complete, none, own)
        self._trailing: WorkItem | None = None  # the last that went to the last lane
        self._main.thread.start()

    @property
    def current(self) -> WorkItem:
        """The item of this thread's lane, elsewhere that of the main lane."""
        return self._lane.current

    @property
    def working(self) -> WorkItem:
        """The item at which the main lane is."""
        return self._main.current

    @property
    def works_here(self) -> bool:
        """Whether this is one of its threads."""
        return hasattr(self._own, "lane")

    @property
    def lane(self) -> int:
        """The number of this thread's lane, elsewhere that of the main lane."""
        return (self._main, self._before, self._after).index(self._lane)

    @property
    def _lane(self) -> _Lane:
        return getattr(self._own, "lane", self._main)

    def suit_delay(
        self, here: Callable[[Any], bool], wake: Callable[[], None], abreast: int
    ) -> None:
        """Suit ranks that are far apart: have items go on while others wait.

        `here` tells whether what was issued is answered; `wake` has who waits look for
        what was submitted; `abreast`: how many items may be under way at once.
        """
        self._far, self._here, self._wake = True, here, wake
        self._abreast = abreast

    def submit(self, job: Job) -> WorkItem:
        """Put a job in line; RuntimeError once the queue was closed: none would run."""
        if self._closed:
            raise RuntimeError(
                "nothing is exchanged any more: sync.remove() was called, or what was "
                "replicated is gone; call replicate() again, on every rank"
            )
        self.submitted += 1
        item = WorkItem(self.submitted, job, self._late, self.name)
        if job.before is not None:
            self._before.put(item)
        self._main.put(item)
        if self._wake is not None:
            self._wake()
        return item

    def begin_next(self) -> None:
        """Begin one more item, if the next one is ready and not too many have begun.

        Nothing begins ahead of one that is `settled`, which relies on where all are, or
        that is not `filled`, for which this thread would wait instead of reading.

        The work of the main lane's item calls this when all that is left of it is
        waiting; elsewhere it does nothing.
        """
        items = self._main.items
        if self._lane is not self._main or self.error is not None or self._advancing:
            return
        for i in range(min(self._abreast - 1, len(items))):
            item = items[i]
            if item is None or not item.ready or item.job.settled:
                return
            if item.begun:
                self._advance(item)
                continue
            if item.job.filled():
                item.early = True
                self._begin(item)
            return

    def close(self, seconds: float | None = None) -> bool:
        """Finish what was submitted and end the threads; returns whether that is done.

        This waits so many seconds at most, and never long for a queue that failed.
        """
        if not self._closed:
            self._closed = True
            self._before.put(None)
            self._main.put(None)
        seconds = STUCK if self.error is not None else seconds
        ended = [lane.ended(seconds) for lane in (self._before, self._main)]
        if all(ended):  # nothing more comes
            self._after.put(None)
        return all(ended) and self._after.ended(seconds)

    def fail_forked(self) -> None:
        """Have what is submitted fail, in a process that was forked from this one."""
        self._asking = threading.Lock()  # whoever had it is not here
        self.error = CommunicationError(
            "this process was forked from one of the ranks, and can exchange nothing: "
            "train in the process that called replicate(), or start others by 'spawn'"
        )

    def _late(self) -> float:
        """Somebody waits for long. Raises what ended the queue, or ends it now."""
        with self._asking:
            if self.error is None:
                try:
                    return self.late()
                except BaseException as error:
                    self.error = self.error or anew(error)
            raise anew(self.error)

    def _prepare(self, item: WorkItem) -> None:
        self._before.current = item
        self._do(item.job.before)
        item.ready = True
        item.preparing.release()

    def _run(self, item: WorkItem) -> None:
        if not item.ready:
            self._main.current = item  # for who asks what is waited for
            item.preparing.acquire()
        if item.job.settled and self._trailing is not None:
            with self._trailing.working:  # until it is through, whatever came of it
                pass
        item.early = False
        self._begin(item)
        self._main.current = item
        self.error = self.error or item.error
        self._do(item.job.work)
        if item.job.after is None:
            item.finish(self.error)
        else:
            self._trailing = item
            self._after.put(item)

    def _complete(self, item: WorkItem) -> None:
        self._after.current = item
        self._do(item.job.after)
        item.finish(self.error)

    def _do(self, work: Callable[[], None] | None) -> None:
        """Run a part of an item, unless the queue has failed."""
        if self.error is None and work is not None:
            try:
                work()
            except BaseException as error:  # the submitter's to handle, in join()
                self.error = self.error or anew(error)

    def _begin(self, item: WorkItem) -> None:
        if item.begun or self.error is not None:
            return
        item.begun = True
        self._ahead(item, item.job.begin)

    def _advance(self, item: WorkItem) -> None:
        if self._far and item.error is None:
            self._advancing = True
            self._ahead(item, partial(item.job.advance, self._here))
            self._advancing = False

    def _ahead(self, item: WorkItem, work: Callable[[], None]) -> None:
        """Have an item do something before its turn."""
        working, self._main.current = self._main.current, item
        try:
            work()
        except BaseException as error:  # raised when the item's turn comes
            item.error = anew(error)
        self._main.current = working


# Those of this process, by their names.
QUEUES: WeakValueDictionary[str, CommQueue] = WeakValueDictionary()


def _orphan() -> None:
    """In a process that was forked: its queues have no threads, and fail."""
    for queue in list(QUEUES.values()):
        queue.fail_forked()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_orphan)


def anew(error: BaseException) -> BaseException:
    """The same, if it is an exchange's, without frames: see [Note: Frames]."""
    own = type(error) is CommunicationError
    return CommunicationError(str(error)) if own else error


def _be_patient() -> None:
    """Interrupt no other thread from now on, see [Note: Patience]."""
    with suppress(AttributeError, OSError):  # other systems; where it is not allowed
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
