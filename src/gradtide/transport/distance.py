"""How far apart ranks are, and what follows from it for messages.

[Note: Far] Between rooms, cities and providers a message is under way for as long as
its bytes take to leave, or for much longer. Where that is so, what costs time is not
bytes alone but how many messages have to wait for each other, and a link that is idle
meanwhile. So far ranks send directly to each other what near ones pass around a ring,
send to all at once what near ones send to one after the other, as a connection that has
just begun does not fill a link, and go on with an item while others wait (`advance`).

The bits of what is computed are the same: sums are taken in the order of a ring in
either case (guard: tests/transport/test_distance.py).
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

FAR = 2e-3  # seconds of one way from which ranks count as far: no switch takes so long
# Seconds a byte that direct messages take longer than a ring's: those of several ranks
# meet at a link, and what its router's queue does not hold is sent again. Found at
# 200 Mb/s, by queues of 50 ms.
CONTENTION = 1e-8
# In Linux's tcp_info: the least round trip seen, in microseconds.
TOLD, LEAST = 168, struct.Struct("=148xI")
UNKNOWN = (1 << 32) - 1


class Distance(NamedTuple):
    """Seconds that a message is under way, as all ranks know it."""

    hop: float = 0.0  # to the next rank on another host, on average
    most: float = 0.0  # to the rank that is furthest

    @property
    def far(self) -> bool:
        """Whether delay is more than what a local network has, see [Note: Far]."""
        return self.most > FAR

    def direct_pays(self, nbytes: float, size: int) -> bool:
        """Whether messages to everybody take less time than a ring of `size` ranks.

        By delay, and not for what is small in any case; `nbytes` are those of all
        parts.
        """
        return nbytes < self.most_direct(size)

    def most_direct(self, size: int) -> float:
        """Bytes of all parts from which a ring of `size` ranks takes less time."""
        return ((size - 1) * self.hop - self.most) / CONTENTION


def distance_of(told: Iterable[tuple[float, float]]) -> Distance:
    """From what each rank has seen: one way to the next, and to the furthest.

    A rank that has met the next one without a network says 0 of it.
    """
    nexts, furthest = zip(*told, strict=True)
    outside = [seconds for seconds in nexts if seconds]
    return Distance(sum(outside) / max(len(outside), 1), max(furthest))


def one_way(connection: socket.socket) -> float:
    """Half the least round trip that the system has seen; 0 where it does not tell."""
    if sys.platform != "linux" or connection.family == socket.AF_UNIX:
        return 0.0
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TOLD)
    except OSError:
        return 0.0
    if len(told) < LEAST.size:
        return 0.0
    (least,) = LEAST.unpack_from(told)
    return 0.0 if least == UNKNOWN else least / 2e6
