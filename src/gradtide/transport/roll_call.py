"""Ranks come together: nothing is made before all are there and say that they can.

Torch makes a group of processes by waiting for all of them, in a call that nobody can
leave until the group's timeout: for a rank that has died, and for one that is refused.
So every rank first leaves word in the job's store: where it listens, or why it cannot
take part, which all then raise. Who waits looks whether the others still live.

[Note: Not here yet] A rank that loads its data for minutes and one that has died have
both said nothing. The user's group tells one from the other: a sum over it, for which
nobody waits, fails where a process has ended.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradtide.core.transport import CommunicationError
from gradtide.transport.addresses import VARIABLE, chosen, loops
from gradtide.transport.doors import Door
from gradtide.transport.fault import GONE, REPORT_SECONDS, own_store
from gradtide.transport.hosts import Whereabouts, whereabouts
from gradtide.transport.links import TRACKS
from gradtide.transport.opening import Meeting

T = TypeVar("T")

TURN = 0.02  # seconds between two looks
PATIENCE = 0.3  # seconds before a rank looks whether others live
OPEN = Path("/proc/self/fd")
SPARE = 16  # descriptors beside those of connections: stores, doors, Gloo's own
# How often the same ranks were called in a job, by its default group: all count alike.
_calls: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()


class RollCall:
    """One call of some ranks (of the default group), who are in `parent`, too."""

    def __init__(
        self,
        parent: dist.ProcessGroup,
        ranks: list[int],
        meeting: Meeting,
        seconds: float,
    ) -> None:
        """`seconds`: how long to wait for a rank that has not come."""
        self._parent, self._meeting, self._seconds = parent, meeting, seconds
        self._rank, self._size = meeting.rank, len(ranks)
        counts = _calls.setdefault(dist.group.WORLD, Counter())
        counts[tuple(ranks)] += 1
        names = ",".join(map(str, ranks))
        self._store = own_store(f"roll call {counts[tuple(ranks)]} of {names}")

    def answer(self) -> list[Whereabouts]:
        """Say where this rank is, and learn where all are, and where they listen.

        Raises ValueError, on every rank, if one cannot take part, and
        CommunicationError if one never will.
        """
        here = whereabouts()
        sum_of_all = self._begin_sum()
        word = here, self._meeting.door, self._meeting.problem or short_of(self._size)
        self._store.set(f"here/{self._rank}", pickle.dumps(word).hex())
        told = self._gather(sum_of_all, here)
        for rank, (*_, problem) in enumerate(told):
            if problem:
                raise ValueError(f"rank {rank} cannot connect to the others: {problem}")
        self._meeting.doors = self._doors(dict(enumerate(told)), here)
        refuse_blind([place for place, *_ in told], [door for _, door, _ in told])
        return [place for place, *_ in told]

    def watch(self, make: Callable[[], T]) -> T:
        """Have something made that waits for all ranks, while all of them live."""
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
                self._look(range(self._size))
        if failed:
            self._look(range(self._size))
            raise failed[0]
        return made[0]

    def _begin_sum(self) -> Any:
        """A sum over the user's group, see [Note: Not here yet]; None if it cannot."""
        if "gloo" not in str(dist.get_backend_config(self._parent)):
            return None
        one = torch.zeros(1, device="cpu")
        return dist.all_reduce(one, group=self._parent, async_op=True)

    def _gather(self, sum_of_all: Any, here: Whereabouts) -> list[Any]:
        """What all ranks say."""
        begin, told = time.monotonic(), dict[int, Any]()
        ended = 0.0  # when the sum failed
        while True:
            for rank in range(self._size):
                key = f"here/{rank}"
                if rank not in told and self._store.check([key]):
                    told[rank] = self._read(key)
            missing = [r for r in range(self._size) if r not in told]
            if not missing:
                return [told[rank] for rank in range(self._size)]
            now = time.monotonic()
            if sum_of_all is not None and not ended and sum_of_all.is_completed():
                ended = now if _failed(sum_of_all) else 0.0
                sum_of_all = None
            if now - begin > PATIENCE:
                self._meeting.doors = self._doors(told, here)
                self._look(told)
            ranks = ", ".join(map(str, missing))
            if ended and now - ended > REPORT_SECONDS:
                one = "" if len(missing) == 1 else "one of "
                self._fail(f"{one}rank {ranks} {GONE}, before it came to connect")
            if now - begin > self._seconds:
                self._fail(f"rank {ranks} did not come in {self._seconds:g} s")
            time.sleep(TURN)

    def _read(self, key: str) -> Any:
        return pickle.loads(bytes.fromhex(self._store.get(key).decode()))

    def _doors(self, told: Mapping[int, Any], here: Whereabouts) -> list[Door]:
        """Those of all ranks, as far as they are known, as this rank may use them."""
        own = self._meeting.door
        found = {
            rank: door if place.network == here.network else door._replace(name="")
            for rank, (place, door, _) in told.items()
        }
        return [found.get(rank, own) for rank in range(self._size)]

    def _look(self, ranks: Iterable[int]) -> None:
        """Raise CommunicationError if one of these ranks has ended, or knows of one."""
        there = self._meeting.presence
        gone = [r for r in ranks if r != self._rank and there.gone(r)]
        try:
            if self._store.check(["failed"]):
                self._fail(self._store.get("failed").decode())
            if gone:
                self._fail(f"rank {', '.join(map(str, gone))} {GONE}")
        except RuntimeError as error:
            if isinstance(error, CommunicationError):
                raise
            self._fail("rank 0 is gone, or who else hosts the job's store")

    def _fail(self, why: str) -> None:
        with suppress(RuntimeError):
            if not self._store.check(["failed"]):
                self._store.set("failed", why)
        raise CommunicationError(f"rank {self._rank}: connecting failed: {why}")


def _failed(work: Any) -> bool:
    try:
        work.wait()
    except RuntimeError:
        return True
    return False


def short_of(size: int) -> str:
    """What to say if this process may not open what a replica of `size` ranks takes.

    The limit is raised as far as the system lets a process raise its own.
    """
    if sys.platform == "win32" or not OPEN.exists():
        return ""
    import resource

    needed = (TRACKS + 2) * (size - 1) + SPARE
    taken = len(os.listdir(OPEN))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and taken + needed > soft:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY or taken + needed <= soft:
        return ""
    return (
        f"a replica of {size} ranks takes up to {needed} file descriptors, and of "
        f"{soft} that a process may open {taken} are taken: start it after "
        f"`ulimit -n {max(4096, 4 * soft)}`, or call sync.remove() where a replica has "
        "done its work"
    )


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
