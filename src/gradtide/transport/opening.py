"""How ranks connect to each other: everybody listens, and the lower rank calls.

[Note: At first use] Two ranks connect when they first exchange something in a lane: a
ring needs two connections of each rank, however many ranks there are. A call does not
wait for who is called. Whoever is to be called waits for the caller, as it would for
the message.

[Note: No network] Ranks that reach each other without a network card connect by a Unix
socket, where there are abstract ones: it takes two thirds of TCP's processor time.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from gradtide.core.ops import Group
from gradtide.transport.addresses import VARIABLE, chosen

HELLO = struct.Struct("!32sII")  # the word of who is called, who calls, and the lane
BACKLOG = 512  # calls that wait to be answered
SLICE = 0.5  # seconds that one lane listens for all of them
CALL = 20.0  # seconds for a call
WORD = 3.0  # seconds for what is said then: nobody else may keep the door


class Door(NamedTuple):
    """Where a rank listens, and the word by which it knows the job's ranks."""

    address: str
    port: int
    name: str  # of a Unix socket; empty for who has to come by the network
    word: bytes


class Meeting:
    """Connects this rank to others, by their numbers in the transport's group."""

    def __init__(self, group: Group, seconds: float) -> None:
        """`seconds`: how long to wait for a rank that is to call."""
        self.rank, self._seconds = group.rank, seconds
        self._made: list[socket.socket] = []
        self._here: dict[tuple[int, int], socket.socket] = {}  # by lane and rank
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._made).atexit = False
        self._listening: dict[int, socket.socket] = {}  # by their numbers
        self.door = Door("", 0, "", secrets.token_bytes(32))
        if group.size > 1:
            self.door = self._listen(self.door.word)
        self.doors = [self.door]  # of all ranks, once they are known

    def _listen(self, word: bytes) -> Door:
        address, name = chosen().address, ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        tcp = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        listening = [tcp]
        if sys.platform == "linux":
            name = f"\0gradtide-{secrets.token_hex(16)}"
            unix = socket.socket(socket.AF_UNIX)
            unix.bind(name)
            unix.listen(BACKLOG)
            listening.append(unix)
        for each in listening:
            each.settimeout(SLICE)
            self._listening[each.fileno()] = each
        self._made.extend(listening)
        return Door(address, tcp.getsockname()[1], name, word)

    def call(self, peer: int, lane: int) -> socket.socket:
        """Connect to a higher rank; OSError says where it was not to be reached."""
        door = self.doors[peer]
        try:
            connection = self._reach(door)
            connection.sendall(HELLO.pack(door.word, self.rank, lane))
        except OSError as error:
            raise OSError(
                f"no connection to {door.address}: {error.strerror or error}; "
                f"{VARIABLE} names the interface that leads to other hosts, and "
                "`gradtide doctor`, started like the script, says who reaches whom"
            ) from error
        self._made.append(connection)
        return connection

    def _reach(self, door: Door) -> socket.socket:
        if door.name:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(CALL)
            try:
                connection.connect(door.name)
                return connection
            except OSError:  # its network has the same name, and is another
                connection.close()
        return socket.create_connection((door.address, door.port), CALL)

    def answer(self, peer: int, lane: int) -> socket.socket:
        """Wait until a lower rank has called."""
        deadline = time.monotonic() + self._seconds
        poll = select.poll()
        for number in self._listening:
            poll.register(number, select.POLLIN)
        while time.monotonic() < deadline:
            with self._lock:  # who holds it listens for the other lanes, too
                if (lane, peer) in self._here:
                    return self._here.pop((lane, peer))
                for number, _ in poll.poll(1e3 * SLICE):
                    with suppress(TimeoutError):
                        self._take(*self._listening[number].accept())
        raise TimeoutError(f"no call in {self._seconds:g} s")

    def hang_up(self) -> None:
        """End all connections; whoever waits at one, here or there, fails now."""
        for each in [*self._made]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections, of which no thread makes use any more."""
        _close(self._made)

    def _take(self, connection: socket.socket, _: object) -> None:
        """Keep a rank's call; others that find the door are sent away."""
        connection.settimeout(WORD)
        said = b""
        with suppress(OSError):
            said = connection.recv(HELLO.size, socket.MSG_WAITALL)
        if len(said) == HELLO.size:
            word, peer, lane = HELLO.unpack(said)
            if secrets.compare_digest(word, self.door.word):
                self._here[lane, peer] = connection
                self._made.append(connection)
                return
        connection.close()


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()
