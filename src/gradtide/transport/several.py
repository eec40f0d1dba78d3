"""How many connections there are to each other rank.

One is best where BBR governs it: several take each other's room. Elsewhere one is slow
for long after a packet was lost: under CUBIC (RFC 9438) it has about 11 Mb/s at .1 % of
loss and 40 ms of round trip, whatever the link's rate. See [Note: Several] of `link`.
Some providers also give one connection no more than a part of a host's rate: there the
user says a number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from gradtide.transport.descriptors import left
from gradtide.transport.stream import governed

CONNECTIONS = "GRADTIDE_CONNECTIONS"  # the environment's word
ALL = 64  # of a rank, where BBR is not allowed: together they fill a link
SEVERAL, MOST = 16, 64  # then to each other rank, at the most; and if the user says so


class Wish(NamedTuple):
    """How many connections to each other rank a rank would have."""

    near: int = 1
    far: int = 1
    room: int = MOST


def wrong() -> str:
    """What to say if the environment's number is none."""
    asked = os.environ.get(CONNECTIONS, "1")
    if asked.isdecimal() and 1 <= int(asked) <= MOST:
        return ""
    return f"{CONNECTIONS}={asked!r} is no number of connections: 1 to {MOST}"


def wish(size: int) -> Wish:
    """What this rank would have, where there are so many ranks."""
    asked = os.environ.get(CONNECTIONS)
    room = max(1, min(left() // (2 * size), MOST))
    if asked is not None:
        return Wish(int(asked), int(asked), room)
    several = max(1, min(ALL // max(size - 1, 1), SEVERAL))
    return Wish(1, 1 if governed() else several, room)


def agreed(wishes: Iterable[Wish], far: bool) -> int:
    """The most that a rank would have, as far as all have room for it."""
    told = [*wishes]
    most = max(one.far if far else one.near for one in told)
    return min(most, *(one.room for one in told))
