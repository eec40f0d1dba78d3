"""Who is missing, and why: what ranks tell each other beside their exchanges.

A rank whose exchange fails says so in the store, and names those whose process has
ended, or that stay silent. A rank whose exchange takes long asks the others where they
are (`inquiry`). A rank that will take part in no more exchanges leaves word of it, and
of its number of steps.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from gradtide.core.ops import Group
from gradtide.core.torch_internals.distributed import default_store
from gradtide.core.transport import Progress
from gradtide.transport.answering import Answering, SilentError
from gradtide.transport.link import DIFFERENT

REPORT_SECONDS = 2.0  # what a rank needs to notice a closed connection, or to answer

GONE = (
    "is gone: its process has ended without a word (killed, or out of memory: look at "
    "its own output)"
)
ALIKE = "All ranks have to make the same calls, in the same order"
AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun's agent hosts the store
UNEQUAL = (
    "If ranks have different numbers of batches, train inside `with sync.join():`, or "
    "give all ranks equally many (DistributedSampler, drop_last=True)"
)


@dataclass(frozen=True)
class Position:
    """Where a rank is in its program."""

    steps: int  # that its optimizer has taken
    items: int  # work items that it has submitted
    doing: str
    final: bool = False  # it submits no more
    members: tuple[int, ...] = ()  # global ranks that must come before it goes on
    item: int = 0  # the number of the item that is at work, and what that is for
    name: str = ""
    awaited: tuple[str, int] = ("", 0)  # the item that it waits for, and its queue
    error: str = ""  # that ended it

    def write(self) -> str:
        """This position as a text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Position:
        """What `write` wrote."""
        found = json.loads(text)
        queue, number = found["awaited"]
        members = tuple(found["members"])
        return cls(**{**found, "members": members, "awaited": (queue, number)})

    def __str__(self) -> str:
        by = f" by {self.error}" if self.error else ""
        return f"took {self.steps} steps and {self.doing}{by}"


@dataclass(frozen=True)
class Failure:
    """An exchange that failed on a rank."""

    position: Position
    why: str = ""  # if that is certain
    looked: bool = False  # whether the rank has found out what there is to find

    def write(self) -> str:
        """This failure as a text."""
        return json.dumps([self.position.write(), self.why, self.looked])

    @classmethod
    def read(cls, text: str) -> Failure:
        """What `write` wrote."""
        position, why, looked = json.loads(text)
        return cls(Position.read(position), why, looked)


class FailureReporter:
    """What ranks leave in the store, each under its own name.

    `gone` tells whether a rank's process has ended (`doors`), and `host` is the rank
    that hosts the store, if it is one of these.
    """

    def __init__(
        self,
        store: Store | Answering,
        group: Group,
        progress: Progress,
        gone: Callable[[int], bool],
        host: int | None,
    ) -> None:
        self._store, self._group, self._progress = store, group, progress
        self._gone, self._host = gone, host

    def explain(
        self,
        request: str,
        error: BaseException,
        peer: int | None,
        own: Position | None = None,
        ask: Callable[[], Mapping[int, Position]] = dict,
    ) -> str:
        """The message of a CommunicationError; `peer` is who the lost message was for.

        A peer that reports a failure of its own within the window only passed it on.
        `own` is where this rank is, and `ask` tells where those are who answer.
        """
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        try:
            self.fail(own)
            certain = self._find(own, text)
            why = certain or self._guess(peer, own, ask)
            self.fail(own, certain, looked=True)
        except SilentError as silent:
            why = host_is_silent(self._host, self._group.rank)
            nor = "" if peer is None else f", nor does rank {peer}, of the exchange"
            why = why or f"{silent}{nor}"
        except RuntimeError:  # the store lived in a process that has ended
            why = self._look_for_host() or "the job's store is gone"
        rank, step = self._group.rank, self._progress.steps + 1
        return f"rank {rank}: {request} failed in step {step}: {why} ({text})"

    def _find(self, own: Position | None, text: str) -> str:
        """What is certain. Whoever knows says so, and others wait for that."""
        deadline = time.monotonic() + REPORT_SECONDS
        while not (certain := self.known()) and time.monotonic() < deadline:
            if not self.silent(("failed", "ended")):
                ended = self.ended()
                certain = self.uneven(ended) if ended else self._apart(own, text)
                if certain:
                    break
                self.fail(own, looked=True)
                if all(failure.looked for failure in self.failed().values()):
                    break
            time.sleep(0.05)
        return certain

    def _guess(
        self,
        peer: int | None,
        own: Position | None,
        ask: Callable[[], Mapping[int, Position]],
    ) -> str:
        """What there is to say where nothing is certain."""
        silent = self.silent(("failed", "ended"))
        if silent and (ended := self.ended()):  # others may only wait for these
            return self.uneven(ended)
        if not silent:
            return f"all ranks noticed{_link(peer)}"
        # Who fails is soon ended by its launcher: it asks only where that may help.
        found = ask() if len(silent) > 1 else {}
        heard = {r: where for r, where in found.items() if r in silent}
        if own and (late := {r: p for r, p in heard.items() if p.items < own.item}):
            return "; ".join(f"rank {r} is late: {where}" for r, where in late.items())
        silent = [r for r in silent if r not in heard] or silent
        # If the peer is, the others may only be waiting for one another.
        ranks = ", ".join(map(str, [peer] if peer in silent else silent))
        none = ": no other rank responds, so this one's own link may be down"
        met = own is not None and own.item > 1  # else others may be connecting
        cut_off = met and not heard and 1 < len(silent) == self._group.size - 1
        why = f"rank {ranks} does not respond (dead, stalled, or ended early)"
        return why + none * cut_off

    def known(self) -> str:
        """Why exchanges fail, if that is certain; otherwise an empty text.

        That is so where a process has ended without a word, or another rank knows.
        """
        gone = [r for r in self.silent(("failed", "ended")) if self._gone(r)]
        gone = [r for r in gone if not self._has("failed", r, "ended")]  # since then
        if gone:
            return f"rank {', '.join(map(str, gone))} {GONE}"
        return next((f.why for f in self.failed().values() if f.why), "")

    def storeless(self) -> str:
        """Who is missing where nobody can leave word any more; empty if nobody is.

        Who has hung up since seems to be gone, too: it is the store's host that counts.
        """
        gone = [r for r in self._others() if self._gone(r)]
        if self._host in gone:
            return f"rank {self._host} {GONE}, and the job's store was there"
        ranks = ", ".join(map(str, gone))
        return f"rank {ranks} {GONE}, and so has the job's store" if gone else ""

    def _look_for_host(self) -> str:
        """`storeless`, as soon as the system has closed the door of who is gone."""
        deadline = time.monotonic() + REPORT_SECONDS
        while not (why := self.storeless()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return why

    def _apart(self, own: Position | None, text: str) -> str:
        """What ranks do that ask for different things; empty if they do not."""
        if own is None:
            return ""
        others = {r: failure.position for r, failure in self.failed().items()}
        apart = {
            r: where
            for r, where in others.items()
            if text.startswith(DIFFERENT)
            or (where.item == own.item and where.name != own.name)
        }
        return self.apart(apart, own) if apart else ""

    def apart(self, others: Mapping[int, Position], own: Position) -> str:
        """What there is to say where ranks ask for different things."""
        where = {**others, self._group.rank: own}
        told = "; ".join(f"rank {rank} {where[rank].doing}" for rank in sorted(where))
        return f"{told}. {ALIKE}"

    def uneven(self, stopped: Mapping[int, Position]) -> str:
        """What there is to say where some ranks stopped before others."""
        told = "; ".join(f"rank {rank} {where}" for rank, where in stopped.items())
        if any(where.error for where in stopped.values()):
            return f"{told}: look at its own output"
        return f"{told}. {UNEQUAL}"

    def fail(self, own: Position | None, why: str = "", looked: bool = False) -> None:
        """Tell the others that an exchange of this rank's failed, and why if known."""
        position = own or Position(self._progress.steps, 0, "is at work")
        self.leave("failed", Failure(position, why, looked).write())

    def leave(self, word: str, text: str) -> None:
        """Tell the others that this rank has "failed" or "ended", and what it knows."""
        self._store.set(f"{word}/{self._group.rank}", text)

    def ended(self) -> dict[int, Position]:
        """The ranks that take part in no more exchanges, and did not fail in one."""
        return {
            r: self.read(f"ended/{r}")
            for r in self._others()
            if self._has("ended", r) and not self._has("failed", r)
        }

    def failed(self) -> dict[int, Failure]:
        """The ranks on which an exchange failed."""
        return {
            r: Failure.read(self._store.get(f"failed/{r}").decode())
            for r in self._others()
            if self._has("failed", r)
        }

    def read(self, key: str) -> Position:
        """A position that a rank has left, as `Position.write` wrote it."""
        return Position.read(self._store.get(key).decode())

    def await_words(
        self,
        words: Iterable[str],
        seconds: float,
        over: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Wait until all others left one of these words; returns those that did not.

        Nobody waits for a process that has ended, nor once it is `over`.
        """
        deadline, words = time.monotonic() + seconds, list(words)
        while True:
            silent = self.silent(words)
            awaited = [r for r in silent if not self._gone(r)]
            if not awaited or over() or time.monotonic() > deadline:
                return silent
            time.sleep(0.05)

    def await_known(self, seconds: float) -> None:
        """Wait until all others have ended, or know what there is to know.

        One that failed has hung up, and seems to be gone while it still looks.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            failed = self.failed()
            know = {r for r, failure in failed.items() if failure.looked}
            left = [r for r in self.silent(["ended"]) if r not in know]
            if all(r not in failed and self._gone(r) for r in left):
                return
            time.sleep(0.05)

    def silent(self, words: Iterable[str]) -> list[int]:
        """The others that have left none of these words."""
        return [r for r in self._others() if not any(self._has(w, r) for w in words)]

    def _others(self) -> list[int]:
        return [r for r in range(self._group.size) if r != self._group.rank]

    def _has(self, word: str, rank: int, *more: str) -> bool:
        return any(self._store.check([f"{w}/{rank}"]) for w in (word, *more))


def _link(peer: int | None) -> str:
    """What is left to say where everybody lives: which link it was, if known."""
    if peer is None:
        return "; see the first rank's error"
    return (
        f", rank {peer} too, with which the exchange was: the link to it was down, or "
        "another's before; see the first rank's error"
    )


def host_is_gone(ranks: Sequence[int]) -> str:
    """What to say where the job's store does not answer; `ranks` of the whole job."""
    if AGENT in os.environ or 0 not in ranks:
        return "the job's store is gone"
    return f"rank {ranks.index(0)} {GONE}, and the job's store was there"


def host_is_silent(host: int | None, rank: int) -> str:
    """What to say where the store does not answer that one of these ranks hosts."""
    if host is None or host == rank:
        return ""
    return (
        f"rank {host} does not respond (stalled, or not to be reached), and the job's "
        "store is there"
    )


def own_store(name: str) -> PrefixStore:
    """The job's store, of which who has the same name has a part of their own.

    It is another connection: one that waits blocks all others that use it, and its
    timeout would be that of the user's.
    """
    store = default_store()
    if hasattr(store, "clone"):  # not before torch 2.8
        store = store.clone()
        store.set_timeout(timedelta(seconds=REPORT_SECONDS))
    return part_of(store, name)


def part_of(store: Store, name: str) -> PrefixStore:
    """The part of the job's store where those who know `name` leave word."""
    return PrefixStore(f"gradtide/{name}", store)
