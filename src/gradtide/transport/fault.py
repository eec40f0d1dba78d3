"""Who is missing, and why: what ranks tell each other beside their exchanges.

A rank whose exchange fails says so in the store, and names those that stay silent. A
rank whose exchange takes long asks the others where they are (`inquiry`). A rank that
will take part in no more exchanges leaves word of it, and of its number of steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradtide.core.ops import Group
from gradtide.core.transport import Progress

REPORT_SECONDS = 2.0  # what a rank needs to notice a closed connection, or to answer

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

    def write(self) -> str:
        """This position as a text."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"took {self.steps} steps and {self.doing}"


class FailureReporter:
    """What ranks leave in the store, each under its own name."""

    def __init__(self, store: Store, group: Group, progress: Progress) -> None:
        self._store, self._group, self._progress = store, group, progress

    def explain(self, request: str, error: RuntimeError, peer: int | None) -> str:
        """The message of a CommunicationError; `peer` is who the lost message was for.

        A peer that reports a failure of its own within the window only passed it on.
        """
        try:
            self.leave("failed")
            silent = self.await_words(["failed", "ended"], REPORT_SECONDS)
            known = self._known()
        except RuntimeError:  # the store lived in the process that died
            missing = "the process that hosts the store (rank 0) is gone"
        else:
            # If the peer is silent, the others may only be waiting for one another.
            ranks = ", ".join(map(str, [peer] if peer in silent else silent))
            missing = f"rank {ranks} does not respond (dead, stalled, or ended early)"
            if not silent:
                missing = known or f"all ranks noticed{_link(peer)}"
        text = str(error).strip().splitlines()[0]
        rank, step = self._group.rank, self._progress.steps + 1
        return f"rank {rank}: {request} failed in step {step}: {missing} ({text})"

    def _known(self) -> str:
        """Why exchanges ended, if that is known: who ended, or what a rank says."""
        ended = self.ended()
        if ended:
            return self.uneven(ended)
        failed = [r for r in self._others() if self._has("failed", r)]
        told = (self._store.get(f"failed/{r}").decode() for r in failed)
        return next(filter(None, told), "")

    def uneven(self, stopped: Mapping[int, Position]) -> str:
        """What there is to say where some ranks stopped before others."""
        told = "; ".join(f"rank {rank} {where}" for rank, where in stopped.items())
        return f"{told}. {UNEQUAL}"

    def leave(self, word: str, text: str = "") -> None:
        """Tell the others that this rank has "failed" or "ended", and what it knows."""
        self._store.set(f"{word}/{self._group.rank}", text)

    def ended(self) -> dict[int, Position]:
        """The ranks that take part in no more exchanges."""
        return {
            r: self.read(f"ended/{r}") for r in self._others() if self._has("ended", r)
        }

    def read(self, key: str) -> Position:
        """A position that a rank has left, as `Position.write` wrote it."""
        found = json.loads(self._store.get(key))
        return Position(**{**found, "members": tuple(found["members"])})

    def await_words(self, words: Iterable[str], seconds: float) -> list[int]:
        """Wait until all others left one of these words; returns those that did not."""
        deadline = time.monotonic() + seconds
        silent, words = self._others(), list(words)
        while True:
            silent = [r for r in silent if not any(self._has(w, r) for w in words)]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.05)

    def _others(self) -> list[int]:
        return [r for r in range(self._group.size) if r != self._group.rank]

    def _has(self, word: str, rank: int) -> bool:
        return bool(self._store.check([f"{word}/{rank}"]))


def _link(peer: int | None) -> str:
    """What is left to say where everybody lives: which link it was, if known."""
    if peer is None:
        return "; see the first rank's error"
    return (
        f", rank {peer} too, with which the exchange was: the link to it was down, or "
        "another's before; see the first rank's error"
    )


def own_store(pg: dist.ProcessGroup) -> Store:
    """The job's store, of which `pg` has a part of its own; torch names it alike.

    It is another connection: one that waits blocks all others that use it, and its
    timeout would be that of the user's.
    """
    store: Store = dist.distributed_c10d._get_default_store()
    if hasattr(store, "clone"):  # not before torch 2.8
        store = store.clone()
        store.set_timeout(timedelta(seconds=REPORT_SECONDS))
    return PrefixStore(f"gradtide/{pg.group_name}", store)
