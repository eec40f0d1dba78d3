"""Lets happen what a cluster's timetable says, when it says so."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gradtide.lab.amounts import format_time
from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.events import Change, Cut, Killed, Slowed, Started
from gradtide.lab.namespaces import Enter
from gradtide.lab.rate import format_rate
from gradtide.lab.router import changed


class Ranks(Protocol):
    """The processes of a run."""

    def kill(self, rank: int) -> bool:
        """Kills a rank; false where it does not run."""

    def start(self, rank: int) -> bool:
        """Starts a rank; false where it runs."""


class Timetable:
    """What is still to happen, from the moment at which this is made."""

    def __init__(
        self, cluster: Cluster, enter: Enter, ranks: Ranks, say: Callable[[str], None]
    ) -> None:
        self._cluster, self._enter, self._ranks = cluster, enter, ranks
        self._say, self._begin = say, time.monotonic()
        self._left = deque(cluster.internet.events if cluster.internet else ())

    @property
    def wait(self) -> float | None:
        """Seconds until the next event; None after the last one."""
        if not self._left:
            return None
        return max(self._begin + self._left[0].at - time.monotonic(), 0.0)

    @property
    def starts(self) -> bool:
        """Whether a rank is still to be started."""
        return any(isinstance(event.change, Started) for event in self._left)

    def go(self) -> None:
        """Lets happen what is due. Raises LabError where it cannot be."""
        while self.wait == 0.0:
            event = self._left.popleft()
            words = self._happen(event.change)
            self._say(f"lab, at {format_time(event.at)}: {words}")

    def _happen(self, change: Change) -> str:
        match change:
            case Killed(rank):
                killed = self._ranks.kill(rank)
                return f"rank {rank} is killed" if killed else f"rank {rank} had ended"
            case Started(rank):
                begun = self._ranks.start(rank)
                return f"rank {rank} is started" if begun else f"rank {rank} runs still"
            case Cut(host, down):
                self._change(change)
                return (
                    f"host {host} {'loses its link' if down else 'has its link back'}"
                )
            case Slowed(host, rate, up):
                self._change(change)
                return f"host {host} has {format_rate(rate)}, up {format_rate(up)}"

    def _change(self, change: Cut | Slowed) -> None:
        assert self._cluster.internet is not None
        lines = changed(self._cluster, self._cluster.internet, change)
        words = [*self._enter(None), "sh", "-ec", "\n".join(lines)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise LabError(f"a link could not be changed: {done.stderr.strip()}")
