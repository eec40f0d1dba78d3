"""Ranks that wait for long ask the others where they are, and learn if it is in vain.

A rank may be late for any good reason: it evaluates, or writes a checkpoint. But a rank
that has run out of batches never comes: its program has ended, or it waits itself for
the others, in a collective of the user's own. To tell one from the other costs nothing
until a rank has waited for some seconds (`comm_queue.PATIENCE`). It then asks through
the store, where a thread of each rank waits for questions. That thread looks at what
its program does, and answers.

[Note: in vain] A rank gives up if another rank has not sent what is waited for, and has
ended, or is inside a collective that needs this rank, too, and still is when it is
asked again. It gives up at once if a process has ended without a word (`doors`), if an
exchange failed elsewhere, if another rank waits in another queue for what this one has
not begun, or if what both wait for has another name there. No clock decides any of
that: neither of the two can ever go on.

[Note: The end of a program] Under `dear` the last update is still on its way when a
program ends without a `flush`. An interpreter that ends while a thread waits in Gloo
aborts the process. So it waits for what was submitted, unless the program failed: a
peer may then never answer. (Guard: tests/test_program_end.py.)
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize, is_exiting
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradtide.core.ops import Group
from gradtide.core.transport import CommunicationError, Progress
from gradtide.transport.answering import Answering, SilentError, is_hosted
from gradtide.transport.comm_queue import (
    PATIENCE,
    QUEUES,
    STUCK,
    CommQueue,
    WorkItem,
    anew,
)
from gradtide.transport.doors import Presence
from gradtide.transport.fault import (
    AGENT,
    REPORT_SECONDS,
    FailureReporter,
    Position,
)
from gradtide.transport.hosts import give_up
from gradtide.transport.opening import Meeting

LOG = logging.getLogger("gradtide.transport")
LONG = 30.0  # seconds of waiting for one item, after which it is told for whom
AGAIN = 2.0  # seconds after which a rank that seems stuck is asked again
LONGEST = 30.0  # seconds between questions to ranks that are merely late
END = 60.0  # seconds that the end of a program waits for what was submitted
LINGER = 6.0  # seconds for which the host of the store waits for others to have read
HEARD = PATIENCE + 1.0  # the same, where an exchange failed: who waits has asked then
FOREVER = timedelta(days=1)
NEVER = 1 << 30  # the tag of a message that nobody sends
HERE = Path(__file__).parents[1]  # gradtide
OURS = f"{HERE}{os.sep}"
LIBRARIES = OURS, f"{Path(torch.__file__).parent}{os.sep}"
CALLED = {"_wrapped_call_impl": "forward", "_call_impl": "forward"}
# These wait for one rank, and not for all of a group.
MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}


class Inquiry:
    """Asks, and answers in a thread of its own; `close` ends that."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        queue: CommQueue,
        progress: Progress,
        meeting: Meeting,
        stores: tuple[PrefixStore, PrefixStore],
    ) -> None:
        """`stores`: two connections to the job's store, one to wait for questions."""
        self._pg, self._queue, self._progress = pg, queue, progress
        self._meeting = meeting
        self._group = Group(pg.rank(), pg.size())
        self._own = dist.get_global_rank(pg, pg.rank())
        self._round = 1  # of questions: its number in the store
        self._asked = 0  # the last round in which this rank asked
        self._suspects: dict[int, Position] = {}
        self._patience = AGAIN
        self._item, self._since = 0, 0.0  # what is waited for, and since when
        # The ranks of which something is to be read now.
        self.unread: Callable[[], Collection[int]] = lambda: ()
        self._closed = False
        self._store, asking = stores
        self._asking = Answering(asking, REPORT_SECONDS)
        self._turn = threading.Lock()  # to ask
        ranks = dist.get_process_group_ranks(pg)
        hosted = AGENT not in os.environ and 0 in ranks and is_hosted(asking)
        self._host = ranks.index(0) if hosted else None
        known = self._group, progress, meeting.presence.gone, self._host
        self.reporter = FailureReporter(self._asking, *known)
        self._thread = threading.Thread(
            target=self._answer, name="gradtide inquiry", daemon=True
        )
        # torch < 2.8 cannot open a second connection, on which to wait.
        if self._group.size > 1 and hasattr(Store, "clone"):
            self._thread.start()

    # - Asking -------------------------------------------------------------------------

    def late(self) -> float:
        """Return for how many seconds to go on waiting for the queue's current item.

        Raises CommunicationError if that would be in vain, see [Note: in vain].
        """
        own = self._position()
        try:
            why = self.reporter.known() or self._in_vain(own)
        except SilentError:  # the exchange itself will fail, if need be
            return LONGEST
        except RuntimeError:  # no store, no answers: the same
            why = self.reporter.storeless()
            if not why:
                return LONGEST
        if not why:
            return self._patience
        with suppress(RuntimeError):
            self.reporter.fail(own, why, looked=True)
        rank, step = self._group.rank, self._progress.steps + 1
        error = CommunicationError(f"rank {rank} waits in vain in step {step}: {why}")
        # First: the queue's thread need not find out what is known already.
        self._queue.error = self._queue.error or anew(error)
        self._sever()
        raise error

    def _in_vain(self, own: Position) -> str:
        """Why it is in vain to wait on, after asking the others; empty if it is not."""
        found = self._ask()
        self._tell(own, found)
        apart = {
            rank: where
            for rank, where in found.items()
            if self._crossed(where, own)
            or (where.item == own.item and where.name != own.name)
        }
        if apart:
            return self.reporter.apart(apart, own)
        stuck = {
            rank: where
            for rank, where in found.items()
            if where.items < own.item and (where.final or self._own in where.members)
        }
        sure = {r: p for r, p in stuck.items() if p.final or self._suspects.get(r) == p}
        if sure:
            return self.reporter.uneven(sure)
        self._suspects = stuck
        self._patience = AGAIN if stuck else min(2 * self._patience, LONGEST)
        return ""

    def _tell(self, own: Position, found: Mapping[int, Position]) -> None:
        """Warn once of an item that is waited for so long, and say of whom."""
        now = time.monotonic()
        if own.item != self._item:
            self._item, self._since = own.item, now - PATIENCE
        if now - self._since >= LONG:
            waited, self._since = now - self._since, math.inf
            LOG.warning(
                "%s",
                long_wait(self._group.rank, waited, own, found, self.unread()),
            )

    def _crossed(self, where: Position, own: Position) -> bool:
        """Whether a rank waits in another queue for what this one has not begun.

        And will not begin: it waits here.
        """
        name, number = where.awaited
        other = QUEUES.get(name)
        return (
            other is not None
            and other is not self._queue
            and other.submitted < number
            and own.awaited[0] == self._queue.name
            and where.items < own.item
        )

    def silent(self, rank: int) -> bool:
        """Whether a rank answers no question; this waits for a while."""
        try:
            return rank not in self._ask()
        except RuntimeError:
            return False

    def explain(self, request: str, error: RuntimeError) -> str:
        """What there is to say of a request that failed; others are told first."""
        own, peer = self._position(), getattr(error, "peer", None)
        with suppress(RuntimeError):
            self.reporter.fail(own)
        self._meeting.hang_up()  # so that those who wait for this rank learn of it
        return self.reporter.explain(request, error, peer, own, self._ask)

    def _sever(self) -> None:
        """Close this rank's connections, so that whoever waits at one fails now.

        Also the queue's thread: one that comes back from torch while the interpreter is
        torn down aborts the process. Gloo closes them all when a wait times out.
        """
        self._meeting.hang_up()
        peer = (self._group.rank + 1) % self._group.size
        with suppress(RuntimeError):
            never = self._pg.recv(
                [torch.empty(1, dtype=torch.float32, device="cpu")], peer, NEVER
            )
            never.wait(timedelta(milliseconds=1))

    def _ask(self) -> dict[int, Position]:
        """Where the others are, as far as they answer."""
        with self._turn:
            found, number = self.reporter.ended(), self._round
            if number == self._asked:  # nobody could answer anew
                return found
            self._asking.set(f"question/{number}", "")
            self._asked = number
            answers = f"answer/{number}"
            words = "ended", answers
            self.reporter.await_words(words, REPORT_SECONDS, self._is_over)
            found = self.reporter.ended()
            # Who has failed before it ended has answered nothing.
            silent = self.reporter.silent([answers])
            for rank in range(self._group.size):
                if rank not in (self._group.rank, *silent, *found):
                    found[rank] = self.reporter.read(f"{answers}/{rank}")
            return found

    def _is_over(self) -> bool:
        """Whether it is known why exchanges fail, so that nobody is to be waited for.

        Who trains may ask while the queue's thread finds out.
        """
        return self._queue.error is not None

    # - Answering ----------------------------------------------------------------------

    def _answer(self) -> None:
        while not self._closed:
            began, number = time.monotonic(), self._round
            try:
                self._store.wait([f"question/{number}"], FOREVER)
                if self._closed:
                    return
                answer = f"answer/{number}/{self._group.rank}"
                self._store.set(answer, self._position().write())
            except RuntimeError:
                if time.monotonic() - began < FOREVER.total_seconds():
                    return  # the store is gone
                continue
            self._round += 1

    def _position(self) -> Position:
        steps, items = self._progress.steps, self._queue.submitted
        current = self._queue.working
        at: dict[str, Any] = {"item": current.number, "name": current.name}
        try:
            dist.get_process_group_ranks(self._pg)
        except (KeyError, ValueError, RuntimeError):
            doing = "has called destroy_process_group()"
            return Position(steps, items, doing, final=True)
        seen = _seen(frame_of(self._progress.trainer))
        return Position(steps, items, **at, **seen)

    # - The end ------------------------------------------------------------------------

    def finish(self) -> None:
        """Have what was submitted done, unless that is in vain."""
        seconds, deadline = PATIENCE, time.monotonic() + END
        with suppress(CommunicationError):  # the queue's own by then
            while not self._queue.close(seconds) and time.monotonic() < deadline:
                seconds = self.late()

    def close(self, doing: str, error: str = "") -> None:
        """Leave word that this rank submits no more, and why; answer no longer."""
        if self._closed:
            return
        self._closed = True
        self._tell_end(doing, error)
        self._asking.end()

    def _tell_end(self, doing: str, error: str) -> None:
        steps, items = self._progress.steps, self._queue.submitted
        where = Position(steps, items, doing, final=True, error=error)
        try:
            self.reporter.leave("ended", where.write())
            self._asking.set(f"question/{self._round}", "")  # wakes the own thread, too
        except RuntimeError:  # no store, nobody to tell
            return
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # It must not wake while the interpreter is being torn down.
            self._thread.join(STUCK)

    def linger(self) -> None:
        """Keep the store open until the others have ended, or know, if it is here."""
        if self._host == self._group.rank:
            failed = self._queue.error is not None
            _linger(self.reporter, HEARD if failed else LINGER)
        self._asking.end()

    def linger_at_exit(self) -> None:
        """`linger` after a failure, when the program ends, and not before it knows."""
        if self._host == self._group.rank:
            there = Presence()
            there.doors = self._meeting.doors
            known = self._group, self._progress, there.gone, self._host
            reporter = FailureReporter(self._asking, *known)
            Finalize(None, _linger, args=(reporter, HEARD), exitpriority=1)

    def tell(self) -> None:
        """Raise what ended the queue, which is printed where nobody can handle it."""
        if self._queue.error is not None:
            raise self._queue.error

    def give_up(self) -> None:
        """Close the group, if the program has not closed all of them."""
        with suppress(KeyError, ValueError, RuntimeError, AssertionError):
            give_up(self._pg)

    def stop_queue(self) -> None:
        """End the queue's thread, which nobody has work for any more."""
        if not self._queue.close(STUCK):
            self._sever()
            self._queue.close(STUCK)
        self._meeting.close()


def _linger(reporter: FailureReporter, seconds: float) -> None:
    with suppress(RuntimeError):
        reporter.await_known(seconds)


def long_wait(
    rank: int,
    seconds: float,
    own: Position,
    found: Mapping[int, Position],
    unread: Collection[int],
) -> str:
    """What to say of ranks that have not come, or else of links that bring nothing."""
    said = f"rank {rank} has waited {seconds:.0f} s in step {own.steps + 1}"
    said += f", for {own.name}" if own.name else ""
    late = {r: where for r, where in found.items() if where.items < own.item}
    if late:
        ranks = "; ".join(f"rank {r} is late: {where}" for r, where in late.items())
        return f"{said}: {ranks}"
    if unread:
        ranks = ", ".join(f"rank {r}" for r in sorted(unread))
        return (
            f"{said}, and every rank that answers has come: what {ranks} sent does not "
            "arrive, or slowly; look at the network between"
        )
    return said


def end(inquiry: Inquiry) -> None:
    """Close an inquiry whose owner is collected, or at the end of the process."""
    if not is_exiting():
        inquiry.close("its replica has been deleted")
        inquiry.stop_queue()
        inquiry.give_up()
        return
    error = getattr(sys, "last_value", None)
    if error is None:
        inquiry.finish()
    # One that the program has caught is why others wait in vain all the same.
    why = error or next((q.error for q in QUEUES.values() if q.error), None)
    inquiry.close("its program has ended", "" if why is None else in_short(why))
    inquiry.linger()
    inquiry.stop_queue()
    if error is None:
        inquiry.tell()


def in_short(error: BaseException) -> str:
    """An error's type and the first line of what it says, if it says anything."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread, None if it has ended.

    Python holds a lock meanwhile that a thread takes at its end. Some versions, 3.11
    among them, may collect garbage there: were that a replica, whose end waits for its
    threads, all would stand still (cpython's issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


def _seen(frame: FrameType | None) -> dict[str, Any]:
    """What a thread with this innermost frame does, and what has to come for it."""
    if frame is None:
        return {"doing": "the thread that trained has ended", "final": True}
    outer, innermost = None, frame
    while frame is not None:
        if frame.f_code is WorkItem.join.__code__:
            item: WorkItem = frame.f_locals["self"]
            doing = f"waits for an exchange in {_call(frame)}"
            return {"doing": doing, "awaited": (item.queue, item.number)}
        if frame.f_code.co_filename == distributed_c10d.__file__:
            outer = frame
        frame = frame.f_back
    if outer is None or outer.f_code.co_name in MESSAGES:
        return {"doing": _at_work(innermost)}
    group = outer.f_locals.get("group") or dist.group.WORLD
    try:
        members = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError, TypeError):
        members = ()
    doing = f"is waiting inside torch.distributed.{outer.f_code.co_name}()"
    return {"doing": doing, "members": members}


def _at_work(frame: FrameType) -> str:
    """What a thread does that waits for nothing: of gradtide's calls, in which one."""
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename.startswith(LIBRARIES):
        if inner.f_code.co_filename.startswith(OURS):
            return f"is at work in {_call(inner)}"
        inner = inner.f_back
    return "is at work"


def _call(frame: FrameType) -> str:
    """The user's call that an innermost frame is in: backward(), load_state_dict()."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(LIBRARIES):
        frame, outer = outer, outer.f_back
    code, inside = frame.f_code, frame.f_locals
    if code.co_name == "__init__":
        return f"{type(inside.get('self')).__name__}()"
    if code.co_name == "wrapper" and inside.get("args"):  # torch's, around step()
        return f"{type(inside['args'][0]).__name__}.step()"
    return f"{CALLED.get(code.co_name, code.co_name)}()"
