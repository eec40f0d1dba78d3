"""How ranks connect to each other: everybody listens, and the lower rank calls.

[Note: At first use] Two ranks connect when they first exchange something in a lane: a
ring needs two connections of each rank, however many ranks there are. A call does not
wait for who is called. Whoever is to be called waits for the caller, as it would for
the message.

[Note: Strangers] Anybody who reaches a rank's address may call, and on its host any
user may call its Unix socket. Who does not say the job's word is sent away, and so is
who says it for a rank and lane that have called before: the word travels as it is, and
who has read it on its way can say it again. Nobody waits for what a caller says: all
that have called are listened to at once. The log names some of those who were sent away
(`strangers`). (Guards: tests/transport/test_links.py, test_strangers.py.)

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from gradtide.core.ops import Group
from gradtide.transport.addresses import VARIABLE, chosen, from_here, loops
from gradtide.transport.doors import Door, Presence
from gradtide.transport.strangers import Strangers

# The word of who is called, who calls, and for which lane or one more connection of it.
HELLO = struct.Struct("!32sII")
BACKLOG = 512  # calls that wait to be answered
SLICE = 0.25  # seconds that one lane listens for all of them
CALL = 20.0  # seconds for a call
WORD = 3.0  # seconds for what is said then
MANY = 256  # callers who have yet to say it: of more, who waits longest has to go


class _Caller:
    """Who has called, and has not said yet who that is."""

    def __init__(self, connection: socket.socket, address: object) -> None:
        connection.setblocking(False)
        self.connection, self.address, self.said = connection, address, b""
        self.until = time.monotonic() + WORD

    def listen(self) -> bool:
        """Hear what there is to hear; returns whether that was all."""
        try:
            more = self.connection.recv(HELLO.size - len(self.said))
        except BlockingIOError:
            return time.monotonic() > self.until
        except OSError:
            more = b""
        self.said += more
        return not more or len(self.said) == HELLO.size


class Meeting:
    """Connects this rank to others, by their numbers in the transport's group."""

    def __init__(self, group: Group, seconds: float) -> None:
        """`seconds`: how long to wait for a rank that is to call."""
        self.rank, self._seconds = group.rank, seconds
        self._made: list[socket.socket] = []
        self._here: dict[tuple[int, int], socket.socket] = {}  # by lane and rank
        self._came: set[tuple[int, int]] = set()  # those that are here or have been
        self._strangers = Strangers()
        self._callers: dict[int, _Caller] = {}  # by the numbers of their sockets
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._made).atexit = False
        self._listening: dict[int, socket.socket] = {}  # by their numbers
        self._poll = select.poll()  # these, and callers
        self.door = Door("", 0, "", secrets.token_bytes(32))
        self.problem = ""  # why this rank has no door
        if group.size > 1:
            try:
                self.door = self._listen(self.door.word)
            except OSError as error:
                self.problem = chosen().error or f"no door at {chosen()}: {error}"
        self.presence = Presence()
        self.doors = [self.door]
        # Whether a rank answers no questions; the transport knows how to ask.
        self.silent: Callable[[int], bool] = lambda _: False

    @property
    def doors(self) -> Sequence[Door]:
        """Those of all ranks, once they are known."""
        return self.presence.doors

    @doors.setter
    def doors(self, doors: Sequence[Door]) -> None:
        self.presence.doors = doors

    def _listen(self, word: bytes) -> Door:
        address, name = chosen().address, ""
        if chosen().error:
            raise OSError(chosen().error)
        family, place = Door(address, 0, "", word).place
        tcp = socket.create_server(place, family=family, backlog=BACKLOG)
        listening = [tcp]
        if sys.platform == "linux":
            name = f"\0gradtide-{secrets.token_hex(16)}"
            unix = socket.socket(socket.AF_UNIX)
            unix.bind(name)
            unix.listen(BACKLOG)
            listening.append(unix)
        for each in listening:
            each.setblocking(False)
            self._listening[each.fileno()] = each
            self._poll.register(each, select.POLLIN)
        self._made.extend(listening)
        return Door(address, tcp.getsockname()[1], name, word)

    def calls(self, peer: int) -> bool:
        """Whether this rank calls another one, or is called.

        The lower one calls, unless the higher one listens inside its host alone.
        """
        low, high = (self.doors[r] for r in sorted((self.rank, peer)))
        far = not self.doors[peer].name and bool(self.door.name)
        turned = far and loops(high.address) and not loops(low.address)
        return (peer > self.rank) != turned

    def call(self, peer: int, lane: int) -> socket.socket:
        """Connect to a rank; OSError says where it was not to be reached."""
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
        self.presence.reached(peer)
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
        return socket.create_connection((from_here(door.address), door.port), CALL)

    def answer(self, peer: int, lane: int) -> socket.socket:
        """Wait until a rank has called; OSError if it never will."""
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            with self._lock:  # who holds it listens for the other lanes, too
                if (lane, peer) not in self._here:
                    self._attend()
                if (lane, peer) in self._here:
                    return self._here.pop((lane, peer))
            self._expect(peer)
        raise TimeoutError(f"no call in {self._seconds:g} s")

    def _expect(self, peer: int) -> None:
        """Raise OSError if nobody is there any more who could call."""
        there = self.presence
        if there.gone(peer) or (there.closed(peer) and self.silent(peer)):
            raise ConnectionError("it listens no longer")

    def keep(self, *sockets: socket.socket) -> None:
        """Close these, too, when all connections are closed."""
        self._made.extend(sockets)

    def hang_up(self) -> None:
        """End all connections; whoever waits at one, here or there, fails now."""
        for each in [*self._made]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections, of which no thread makes use any more."""
        self.presence.close()
        _close(self._made)

    def _attend(self) -> None:
        """Wait a while for calls, and for what callers say, see [Note: Strangers]."""
        ready = {number for number, _ in self._poll.poll(1e3 * SLICE)}
        for number in ready & self._listening.keys():
            with suppress(OSError):  # who called is gone, or there are no more numbers
                caller = _Caller(*self._listening[number].accept())
                self._made.append(caller.connection)
                self._callers[caller.connection.fileno()] = caller
                self._poll.register(caller.connection, select.POLLIN)
        for number in [number for number, one in self._callers.items() if one.listen()]:
            self._decide(number)
        while len(self._callers) > MANY:
            self._decide(next(iter(self._callers)))

    def _decide(self, number: int) -> None:
        """Keep a rank's call; others that find the door are sent away."""
        self._poll.unregister(number)
        caller = self._callers.pop(number)
        if len(caller.said) == HELLO.size:
            word, peer, lane = HELLO.unpack(caller.said)
            known = secrets.compare_digest(word, self.door.word)
            if known and self._is_due(peer, lane):
                self._came.add((lane, peer))
                self._here[lane, peer] = caller.connection
                return
        if caller.said:  # ranks that only look whether this one lives say nothing
            self._strangers.sent_away(caller.address)
        self._made.remove(caller.connection)
        caller.connection.close()

    def _is_due(self, peer: int, lane: int) -> bool:
        """Whether a rank has yet to call in a lane, see [Note: Strangers]."""
        if peer == self.rank or peer >= len(self.doors) or self.calls(peer):
            return False
        return (lane, peer) not in self._came


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()
