"""How many messages wait for each other in a step: a count of real ranks' requests.

[Note: Hops] Where ranks are far apart, a step takes as long as the longest row of
messages of which each waits for the one before: of *hops*, each half a round trip.
Requests of an item follow each other; items run beside each other, as their messages
are short for the link. Who waits for an item goes on when it has ended. So each rank
counts hops as a clock counts seconds: an item begins at the time of who submits it, a
request takes its `cost.hops`, and a join brings the training thread to the item's time.
Nothing else takes time.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from gradtide.core.ops import Op
from gradtide.core.transport import Job, Ticket, Transport
from gradtide.planner.clock.cost import hops

# What ranks tell each other that is no gradient. Of each there is a clock of its own,
# on which it takes no time: the difference is what it costs.
TOLD = "used", "finite", "alike", "join", "broadcast"
Time: TypeAlias = Any  # an array: hops so far, and without each of these


@dataclass(eq=False)
class Item:
    """What was submitted, and until when it has come; `before` has to be over."""

    name: str
    time: Time
    before: Sequence[Item]

    def catch_up(self) -> None:
        for item in self.before:
            self.time = np.maximum(self.time, item.time)

    def takes(self, count: int) -> Time:
        return count * np.array([True, *(self.name != told for told in TOLD)])


@dataclass(frozen=True)
class Stepped:
    """Hops of a step; of these the ones that wait for what is `told` alone; and what
    else travelled, beside the longest row."""

    hops: int
    told: dict[str, int]
    beside: tuple[str, ...]


@dataclass(eq=False)
class Clock:
    """Counts the hops of a transport, in whose place it submits and asks."""

    transport: Transport
    now: Time = field(default_factory=lambda: np.zeros(1 + len(TOLD), dtype=int))

    def __post_init__(self) -> None:
        own: Any = self.transport
        self._submit, self._issue, self._wait = own.submit, own.issue, own.wait
        own.submit, own.issue, own.wait = self.submit, self.issue, self.wait
        self._items: list[Item] = []
        self._last: dict[str, Item] = {}
        self._running = threading.local()
        self._read = self.now

    def step(self) -> Stepped:
        """What has happened since the last call."""
        new, self._read = self.now - self._read, self.now
        names = {re.sub(r"\d+$", "", item.name) for item in self._items}
        self._items = []
        cost = zip(TOLD, (int(new[0] - without) for without in new[1:]), strict=True)
        told = {name: count for name, count in cost if count}
        return Stepped(int(new[0]), told, tuple(sorted(names - {"grad", *told})))

    def submit(self, job: Job) -> Ticket:
        """A bucket is one item after the other, and inverses are made of all sums."""
        before = [self._last[job.name]] if job.name in self._last else []
        if job.settled:
            before = [*self._items]
        if job.name.startswith("kfac.inverse"):
            before += [i for i in self._items if re.match(r"kfac\.[AG]", i.name)]
        item = Item(job.name, self.now, before)
        self._last[job.name] = item
        self._items.append(item)
        given = {
            "begin": job.begin,
            "work": job.work,
            "before": job.before,
            "after": job.after,
            "advance": lambda here: job.advance(lambda pending: here(pending[0])),
        }
        on = {part: self._on(item, run) for part, run in given.items() if run}
        return Joined(self, item, self._submit(replace(job, **on)))

    def _on(self, item: Item, run: Callable[..., None]) -> Callable[..., None]:
        def running(*args: Any) -> None:
            before = getattr(self._running, "item", None)
            self._running.item = item
            item.catch_up()
            try:
                run(*args)
            finally:
                self._running.item = before

        return running

    def issue(self, op: Op) -> Any:
        item = self._running.item
        answered = item.time + item.takes(hops(op, self.transport.group))
        return self._issue(op), item, answered

    def wait(self, pending: Any) -> Any:
        asked, item, answered = pending
        answer = self._wait(asked)
        item.time = np.maximum(item.time, answered)
        return answer


@dataclass(frozen=True)
class Joined:
    """A ticket; who joins it is at its time."""

    clock: Clock
    item: Item
    ticket: Ticket

    def done(self) -> bool:
        return self.ticket.done()

    def join(self) -> None:
        self.ticket.join()
        self.clock.now = np.maximum(self.clock.now, self.item.time)
