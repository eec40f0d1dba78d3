"""A timetable: what happens to links and ranks while a cluster is used.

Numbers and names only; `router` changes links, and `launch` kills and starts ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Cut:
    """A host's link is down: what is sent is lost, nobody is told. Or it is back."""

    host: int
    down: bool


@dataclass(frozen=True)
class Slowed:
    """A host's link has other rates from now on, in bits/s."""

    host: int
    rate: float
    up: float


@dataclass(frozen=True)
class Killed:
    """A rank is killed (SIGKILL), which is then no failure of the run."""

    rank: int


@dataclass(frozen=True)
class Started:
    """A rank that was killed, or has ended, is started anew."""

    rank: int


OfLink: TypeAlias = Cut | Slowed
Change: TypeAlias = OfLink | Killed | Started


@dataclass(frozen=True)
class Event:
    """Something that happens `at` seconds after all ranks have been started."""

    at: float
    change: Change
