"""Callers that are no rank of the job: what the log says of them.

Anybody may call, and as often as he likes (`opening`, [Note: Strangers]): so the log
names the first few, and then says at 10, 100, 1000, ... how many there have been.
"""

from __future__ import annotations

import logging

LOG = logging.getLogger("gradtide.transport")
NAMED = 3  # callers of which the log says each one's address


class Strangers:
    """Those whom one rank has sent away."""

    def __init__(self) -> None:
        self._count, self._next = 0, 10

    def sent_away(self, address: object) -> None:
        """Count one, which is told in a line of the log at most.

        `address` is what the system says of where it called from.
        """
        self._count += 1
        who = "a process of this host"
        if isinstance(address, tuple):
            who = f"{address[0]} port {address[1]}"
        if self._count <= NAMED:
            LOG.warning(
                "%s called and is no rank that is due, so it was sent away: others "
                "than this job's ranks reach the port at which one listens",
                who,
            )
        elif self._count == self._next:
            self._next *= 10
            LOG.warning(
                "%d callers that are no ranks have been sent away so far, lastly %s",
                self._count,
                who,
            )
