"""Where ranks listen, and whether they still do.

A process that ends, whatever ended it, closes its door, and the system says so to
whoever knocks, or has knocked before. One that is at work, late or stopped has a door
at which one can knock all the same. So ranks that wait tell one from the other without
a clock, and without a message that anybody would have to answer.

[Note: Firewalls] Where a rank was never reached by the network, a door that is closed
may be a firewall's, which lets calls pass in the other direction only. It tells
something of a rank that has been reached, or that is on this host, and of no other.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradtide.transport.addresses import from_here, loops


class Door(NamedTuple):
    """Where a rank listens, and the word by which it knows the job's ranks."""

    address: str
    port: int
    name: str  # of a Unix socket; empty for who has to come by the network
    word: bytes

    @property
    def place(self) -> tuple[int, Any]:
        """The family of its address, and what to connect to by the network."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        address = from_here(self.address)
        return family, socket.getaddrinfo(address, self.port, family)[0][4]


class Presence:
    """Whether other ranks are there, by their numbers; see above."""

    def __init__(self) -> None:
        self.doors: Sequence[Door] = ()
        self._calls: dict[int, socket.socket] = {}
        self._reached: set[int] = set()  # see [Note: Firewalls]
        self._closed: set[int] = set()
        self._lock = threading.Lock()

    def gone(self, peer: int) -> bool:
        """Whether a rank has closed its door for certain. This waits for nothing."""
        return self.closed(peer) and (peer in self._reached or self._is_near(peer))

    def closed(self, peer: int) -> bool:
        """Whether its door is closed, perhaps by a firewall. This waits for nothing."""
        with self._lock:
            if peer not in self._closed and peer < len(self.doors):
                self._look(peer)
            return peer in self._closed

    def reached(self, peer: int) -> None:
        """Learn that a call to a rank has come through, see [Note: Firewalls].

        Strangers may fill its door later, so that nobody who knocks comes through.
        """
        self._reached.add(peer)

    def close(self) -> None:
        """Let go of all doors."""
        with self._lock:
            for call in self._calls.values():
                call.close()
            self._calls.clear()
            self.doors = ()

    def _is_near(self, peer: int) -> bool:
        return bool(self.doors[peer].name) or loops(self.doors[peer].address)

    def _look(self, peer: int) -> None:
        """See what has become of an earlier call; knock if there is none any more.

        A call that has ended is no closed door: who takes calls sends those away that
        say nothing.
        """
        call = self._calls.pop(peer, None)
        error = errno.ENOTCONN if call is None else _state(call)
        if call is None or error:
            if call is not None:
                call.close()
            call, error = _knock(self.doors[peer])
            error = error or _state(call)
        if error == errno.ECONNREFUSED:
            self._closed.add(peer)
        if error not in (0, errno.EINPROGRESS):
            call.close()
            return
        self._calls[peer] = call
        if not error:
            self._reached.add(peer)


def _knock(door: Door) -> tuple[socket.socket, int]:
    """A call that says nothing, and why it cannot be made."""
    family, place = (socket.AF_UNIX, door.name) if door.name else door.place
    call = socket.socket(family)
    call.setblocking(False)
    error = call.connect_ex(place)
    return call, 0 if error == errno.EINPROGRESS else error


def _state(call: socket.socket) -> int:
    """0 for a call that holds, EINPROGRESS for one on its way; else what ended it."""
    poll = select.poll()
    poll.register(call, select.POLLIN | select.POLLOUT)
    ready = poll.poll(0)
    if not ready:
        return errno.EINPROGRESS
    if ready[0][1] == select.POLLOUT:
        return 0
    return call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or errno.ENOTCONN


def refuses(host: str, port: int, seconds: float) -> bool:
    """Whether nobody listens any more at a port; this waits for so long at most."""
    try:
        socket.create_connection((host, port), seconds).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # it says nothing of who listens there
        pass
    return False
