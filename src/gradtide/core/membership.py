"""Who trains together now, where ranks come and go.

Who is there is decided elsewhere, by what counts ranks: a lighthouse of torchft's, say.
Here is what a replica asks of it. Ranks are counted when a step is over that exchanged
something: all of them ask, and each gets the same `Roster`. One that says something
else than the ranks that this rank trains with begins another generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from gradtide.core.grace import Grace


@dataclass(frozen=True)
class Standing:
    """What a rank says of itself when it is counted."""

    progress: int = 0  # exchanges of buckets that have taken effect; -1: it has no run
    lost: bool = False  # its exchanges have failed since it was counted last
    run: str = ""  # what no other run is called; empty: it has none

    def tell(self) -> dict[str, Any]:
        """This standing as a dictionary of plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Member:
    """A rank that is there: its own name, where its store is, and how it stands."""

    name: str
    store: str
    standing: Standing = Standing()

    @property
    def process(self) -> tuple[str, str]:
        """What no other process has: one that was started again has another store."""
        return self.name, self.store


@dataclass(frozen=True)
class Roster:
    """Those who are there, in the order of their ranks; `number` is of no other one.

    Attributes:
        since: Changes when a rank goes or comes, also where it has come back meanwhile.
    """

    number: str
    members: Sequence[Member]
    since: str = ""

    @property
    def source(self) -> int:
        """The rank that the others go on from: the first whose run is the furthest.

        Of several runs that are as far, as of ranks that have lost sight of each other,
        the one that more ranks have.
        """
        standing = [member.standing for member in self.members]
        most, runs = max(one.progress for one in standing), [s.run for s in standing]
        furthest = [i for i, one in enumerate(standing) if one.progress == most]
        return max(furthest, key=lambda i: (runs.count(runs[i]), -i))

    @property
    def late(self) -> list[bool]:
        """Of each, whether it has yet to hear of what the source has."""
        there = self.members[self.source].standing
        return [
            m.standing.progress < there.progress or m.standing.run != there.run
            for m in self.members
        ]

    @property
    def apart(self) -> list[str]:
        """The names of those that have a run, which is not the source's."""
        run = self.members[self.source].standing.run
        told = [(m.name, m.standing) for m in self.members]
        return [name for name, one in told if one.progress >= 0 and one.run != run]

    def differs(self, before: Roster) -> bool:
        """Whether these have to form a group anew, who were together `before`.

        Where a rank was missing meanwhile, the others have formed one without it, and
        those who are there now have to meet, though they are the same.
        """
        now, then = ([m.process for m in one.members] for one in (self, before))
        again = now != then or self.since != before.since
        return again or any(member.standing.lost for member in self.members)


class Membership(Protocol):
    """Counts ranks, and has those that were counted form a process group.

    Attributes:
        name: This rank's own, which no other has.
        grace: For how long ranks wait in rounds for slower ones; None stands for ever.
        patience: Seconds for which others are waited for that have yet to come.
    """

    name: str
    patience: float

    @property
    def grace(self) -> Grace | None: ...

    def ask(self, standing: Standing) -> None:
        """Have the ranks counted, for the next step; returns at once."""

    def answer(self) -> Roster | None:
        """Wait for it; None if nobody has asked, or nobody could count.

        Raises CommunicationError if nobody could for too long.
        """

    def form(self, roster: Roster) -> None:
        """Make these ranks the default process group, in the place of what was.

        Raises CommunicationError if one of them does not come.
        """

    def close(self) -> None:
        """Take part no more: who counts next does without this rank."""
