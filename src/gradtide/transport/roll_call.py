"""Ranks come together: nothing is made before all are there and say that they can.

Torch makes a group of processes by waiting for all of them, in a call that nobody can
leave until the group's timeout: for a rank that has died, and for one that is refused.
So every rank first leaves word in the job's store: where it listens, or why it cannot
take part, which all then raise. Who waits looks whether the others still live.

[Note: Not here yet] A rank that loads its data for minutes and one that has died have
both said nothing. The user's group tells one from the other: a sum over it, for which
nobody waits, fails where a process has ended. There is one before a rank has said its
word and one after it: who has a part in the first may die before the word, and who has
one in the second has a door.

[Note: Plain words] Whoever reaches the job's store can write there. What ranks read in
it is JSON, which can say something wrong, and runs nothing.
(Guard: tests/transport/test_roll_call.py.)
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradtide.core.torch_internals.distributed import default_store
from gradtide.core.transport import CommunicationError
from gradtide.transport.addresses import VARIABLE, chosen, loops
from gradtide.transport.answering import Answering, SilentError, is_hosted
from gradtide.transport.descriptors import short_of
from gradtide.transport.doors import Door, refuses
from gradtide.transport.fault import (
    AGENT,
    GONE,
    REPORT_SECONDS,
    Failure,
    Position,
    host_is_gone,
    host_is_silent,
    own_store,
    part_of,
)
from gradtide.transport.hosts import Whereabouts, whereabouts
from gradtide.transport.opening import Meeting
from gradtide.transport.several import wrong

T = TypeVar("T")

SOON, TURN = 0.001, 0.02  # seconds between two looks, at first and at most
GRACE = 1.5  # seconds for those who are about to come, if one never will
LONG_GRACE = 6.0  # the same where several may be meant: one may wait, and say for whom
PATIENCE = 0.3  # seconds before a rank looks whether others live
KNOCK = 1.0  # seconds before it looks whether the store does; then twice as many
# How often the same ranks were called in a job, by its default group: all count alike.
_calls: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()


class Word(NamedTuple):
    """What a rank says of itself: where it is and listens, and why it has no part."""

    place: Whereabouts
    door: Door
    kind: str  # of the device that its tensors are on
    problem: str

    def write(self) -> str:
        """This word as a text, see [Note: Plain words]."""
        *where, word = self.door
        return json.dumps([self.place, [*where, word.hex()], self.kind, self.problem])

    @classmethod
    def read(cls, text: str) -> Word:
        """What `write` wrote."""
        place, (address, port, name, word), kind, problem = json.loads(text)
        door = Door(address, port, name, bytes.fromhex(word))
        return cls(Whereabouts(*place), door, kind, problem)


class RollCall:
    """One call of some ranks (of the default group), who are in `parent`, too."""

    def __init__(
        self,
        parent: dist.ProcessGroup,
        ranks: list[int],
        meeting: Meeting,
        seconds: float,
        kind: str,
    ) -> None:
        """`seconds`: how long to wait for a rank that has not come.

        `kind`: that of the device that this rank's tensors are on.
        """
        self._parent, self._meeting, self._seconds = parent, meeting, seconds
        self._kind = kind
        self._rank, self._size = meeting.rank, len(ranks)
        self._told: dict[int, Word] = {}
        self._ranks = ranks
        counts = _calls.setdefault(dist.group.WORLD, Counter())
        counts[tuple(ranks)] += 1
        names = ",".join(map(str, ranks))
        self._host = AGENT not in os.environ and dist.get_rank() == 0
        self._sum = self._begin_sum()
        self._ended = 0.0  # when that failed
        self._knock = time.monotonic() + KNOCK, KNOCK  # when, and how long after that
        # Of the part of the store where these ranks leave word, now and later; and of
        # that of the call before, on which another may still be at work.
        number = counts[tuple(ranks)]
        self.name, self._last = (
            f"roll call {n} of {names}" for n in (number, number - 1)
        )
        # Torch waits for a store, too, if who hosts it has died.
        found = self._apart(lambda: own_store(self.name), self._look_for_store)
        self._store = Answering(found, seconds)

    def answer(self) -> list[Whereabouts]:
        """Say where this rank is, and learn where all are, and where they listen.

        Raises ValueError, on every rank, if one cannot take part, and
        CommunicationError if one never will.
        """
        try:
            return self._answer()
        except SilentError as error:
            self._fail(self._silent(error))

    def _answer(self) -> list[Whereabouts]:
        here = whereabouts()
        problem = self._meeting.problem or short_of(self._size) or wrong()
        word = Word(here, self._meeting.door, self._kind, problem)
        self._store.set(f"here/{self._rank}", word.write())
        self._sum = self._begin_sum()
        told = self._gather(here)
        for rank, said in enumerate(told):
            if said.problem:
                raise ValueError(
                    f"rank {rank} cannot connect to the others: {said.problem}"
                )
        self._meeting.doors = self._doors(dict(enumerate(told)), here)
        refuse_blind([said.place for said in told], [said.door for said in told])
        refuse_unlike([said.kind for said in told])
        return [said.place for said in told]

    def watch(self, make: Callable[[], T]) -> T:
        """Have something made that waits for all ranks, while all of them live."""
        try:
            self._store.set(f"makes/{self._rank}", "")
            return self._apart(make, lambda: self._look(range(self._size)))
        except (CommunicationError, dist.DistNetworkError):
            raise
        except SilentError as error:
            self._fail(self._silent(error))
        except RuntimeError as error:
            if "time" not in str(error).lower():  # "Wait timeout", "timed out waiting"
                raise
            self._fail(self._stalled(error))  # torch's own, which names nobody
        finally:
            self._store.end()

    def _stalled(self, error: RuntimeError) -> str:
        """Who does not respond, as something that all make came to nothing."""
        others = [r for r in range(self._size) if r != self._rank]
        try:
            late = [r for r in others if not self._store.check([f"makes/{r}"])]
        except SilentError as silent:
            return self._silent(silent)
        # All have begun: one of them has been stopped since.
        one_of = "" if late or len(others) == 1 else "one of "
        names = f"{one_of}rank {', '.join(map(str, late or others))}"
        text = str(error).splitlines()[0]
        return f"{names} does not respond (stalled, or not to be reached) ({text})"

    def _apart(self, make: Callable[[], T], look: Callable[[], None]) -> T:
        """Make something in a thread of its own, and `look` whether that will be."""
        made: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                made.append(make())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="gradtide connects", daemon=True)
        thread.start()
        begin = time.monotonic()
        while thread.is_alive():
            thread.join(TURN)
            if time.monotonic() - begin > PATIENCE:
                look()
        if failed:
            look()
            raise failed[0]
        return made[0]

    def _begin_sum(self) -> Any:
        """A sum over the user's group, see [Note: Not here yet]; None if it cannot."""
        if "gloo" not in str(dist.get_backend_config(self._parent)):
            return None
        one = torch.zeros(1, dtype=torch.float32, device="cpu")
        return dist.all_reduce(one, group=self._parent, async_op=True)

    def _look_for_store(self) -> None:
        """Raise CommunicationError if nobody hosts the store any more.

        Knocking is dear where names are: the store looks up that of whoever comes.
        """
        self._look_at_sum()
        (when, pause), now = self._knock, time.monotonic()
        if now > when and not self._host:
            self._knock = now + 2 * pause, 2 * pause
            if is_abandoned(default_store()):
                self._fail(host_is_gone(self._ranks))

    def _look_at_sum(self) -> None:
        """Raise CommunicationError if the sum failed some time ago."""
        now = time.monotonic()
        if self._sum is not None and self._sum.is_completed():
            self._ended = now if _failed(self._sum) else 0.0
            self._sum = None
        if not self._ended:
            return
        if before := self._learnt_before():
            self._fail(before)
        missing = self._missing()
        if now - self._ended > (GRACE if len(missing) == 1 else LONG_GRACE):
            one_of = "one of " if len(missing) > 1 else ""
            names = f"{one_of}rank {', '.join(map(str, missing))}"
            self._fail(f"{names} {GONE}, before it came to connect")

    def _learnt_before(self) -> str:
        """Who is gone, as exchanges of the last call's replica failed for that."""
        if not hasattr(self, "_store"):
            return ""
        plain = part_of(self._store.plain.underlying_store, self._last)
        last = Answering(plain, REPORT_SECONDS)
        keys = [key for r in range(self._size) if last.check([key := f"failed/{r}"])]
        told = (Failure.read(last.get(key).decode()).why for key in keys)
        return next((why for why in told if GONE in why), "")

    def _missing(self) -> list[int]:
        """Who has said nothing; while nobody can, who hosts the store."""
        if not hasattr(self, "_store") and 0 in self._ranks and AGENT not in os.environ:
            return [self._ranks.index(0)]
        return [r for r in range(self._size) if r not in (self._rank, *self._told)]

    def _gather(self, here: Whereabouts) -> list[Word]:
        """What all ranks say."""
        begin, told, pause = time.monotonic(), self._told, SOON
        while True:
            for rank in range(self._size):
                key = f"here/{rank}"
                if rank not in told and self._store.check([key]):
                    told[rank] = Word.read(self._store.get(key).decode())
            if len(told) == self._size:
                return [told[rank] for rank in range(self._size)]
            waited = time.monotonic() - begin
            if waited > PATIENCE:
                self._meeting.doors = self._doors(told, here)
                self._look(told)
            self._look_at_sum()
            if waited > self._seconds:
                names = ", ".join(map(str, self._missing()))
                self._fail(f"rank {names} did not come in {self._seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, TURN)

    def _doors(self, told: Mapping[int, Word], here: Whereabouts) -> list[Door]:
        """Those of all ranks, as far as they are known, as this rank may use them."""
        own = self._meeting.door
        found = {
            rank: said.door
            if said.place.network == here.network
            else said.door._replace(name="")
            for rank, said in told.items()
        }
        return [found.get(rank, own) for rank in range(self._size)]

    def _look(self, ranks: Iterable[int]) -> None:
        """Raise CommunicationError if one of these ranks has ended, or knows of one."""
        there = self._meeting.presence
        gone = [r for r in ranks if r != self._rank and there.gone(r)]
        try:
            if self._store.check(["failed"]):
                self._fail(self._store.get("failed").decode())
            # Others have ended since, because they know.
            gone = [r for r in gone if not self._has_left_word(r)] or gone
            if gone:
                self._fail(f"rank {', '.join(map(str, gone))} {GONE}")
        except SilentError as error:
            self._fail(self._silent(error))
        except RuntimeError as error:
            if isinstance(error, CommunicationError):
                raise
            lost = isinstance(error, dist.DistNetworkError)
            silent = f"the job's store does not answer ({error})"
            self._fail(store_is_lost(self._ranks, self._rank) if lost else silent)

    def _silent(self, error: SilentError) -> str:
        """What to say where the store does not answer."""
        return _host_is_silent(self._ranks, self._rank) or str(error)

    def _has_left_word(self, rank: int) -> bool:
        return any(self._store.check([f"{w}/{rank}"]) for w in ("failed", "ended"))

    def _fail(self, why: str) -> NoReturn:
        """Raise CommunicationError, and tell the others."""
        with suppress(RuntimeError, AttributeError):  # no store
            if not self._store.check(["failed"]):
                self._store.set("failed", why)
            self._store.set(f"heard/{self._rank}", "")
            # For those who are connected, and find that this rank has gone.
            where = Position(0, 0, "could not connect", final=True, error=why)
            self._store.set(f"ended/{self._rank}", where.write())
            self._linger()
        raise CommunicationError(f"rank {self._rank}: connecting failed: {why}")

    def _linger(self) -> None:
        """Keep the store until the others have heard, or might have, if it is here."""
        deadline, there = time.monotonic() + REPORT_SECONDS, self._meeting.presence
        others = [r for r in range(self._size) if self._host and r != self._rank]
        while others and time.monotonic() < deadline:
            others = [
                rank
                for rank in others
                if not (self._store.check([f"heard/{rank}"]) or there.gone(rank))
            ]
            time.sleep(TURN)


def store_is_lost(ranks: Sequence[int], rank: int) -> str:
    """What to say where the way to the job's store is lost, to one of these `ranks`.

    Who hosts it may live, and the link to it be down: only a door that is closed tells.
    """
    if is_abandoned(default_store()):
        return host_is_gone(ranks)
    return _host_is_silent(ranks, rank) or str(SilentError())


def _host_is_silent(ranks: Sequence[int], rank: int) -> str:
    """What to say where the store is silent that one of these ranks hosts, if it is."""
    hosted = 0 in ranks and AGENT not in os.environ
    return host_is_silent(ranks.index(0) if hosted else None, rank)


def is_abandoned(store: Any) -> bool:
    """Whether nobody listens any more where a job's store was, if it was at a port."""
    if not is_hosted(store):
        return False
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return refuses(store.host, store.port, REPORT_SECONDS)


def _failed(work: Any) -> bool:
    try:
        work.wait()
    except RuntimeError:
        return True
    return False


def refuse_blind(places: Sequence[Whereabouts], doors: Sequence[Door]) -> None:
    """Raise ValueError for two ranks of which neither can reach the other."""
    inside = [r for r, door in enumerate(doors) if loops(door.address)]
    for one in inside:
        for other in inside:
            if places[one].network != places[other].network:
                raise ValueError(
                    f"rank {one} and rank {other} are on different hosts, and both "
                    f"listen at {doors[one].address}, which leads nowhere but to the "
                    f"own host: set {VARIABLE} to the interface that leads to the "
                    f"others (now {os.environ.get(VARIABLE) or chosen().why})"
                )


def refuse_unlike(kinds: Sequence[str]) -> None:
    """Raise ValueError for ranks whose tensors are on devices of other kinds."""
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"rank 0 has its parameters on {kinds[0]}, rank {rank} on {kind}: move "
                "the model to the same kind of device on every rank"
            )
