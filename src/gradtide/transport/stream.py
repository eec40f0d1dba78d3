"""One of the connections to a rank: a frame that leaves on it, and one that arrives.

[Note: Wakes] A thread is woken when a whole piece has arrived, as far as the system
allows (SO_RCVLOWAT), and sends a whole piece at once: sockets hold several. TCP's own
measure is what is under way, often less than a piece, and then a thread is woken once
more to send the rest. But it would hold more than a system's limit for those that ask
(net.core.wmem_max, often 208 KB), so that where this is low it is left alone.

[Note: Windows] Over a long way TCP lets only so much be under way as its receiver has
read lately: one that sleeps until a whole piece is here holds its sender up. So far
ranks are woken for less. Their sockets are as large as TCP finds right, or larger where
the system lets those that ask have more: what is under way takes room until it is
confirmed, 5 MB at 1 Gb/s and 40 ms. They hold little that has yet to leave
(TCP_NOTSENT_LOWAT): an earlier item would wait behind it.
What a connection has learned of its way is also forgotten when it is idle, as between
steps it is, and a packet that is lost makes it slow, unless it is governed by BBR
(Cardwell et al., ACM Queue 2016), where the system allows that.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias

CHUNK = 1 << 18  # bytes of a piece at the most: what is added is still in cache
FAR_PIECE = 1 << 14  # those for which a thread is woken, where they are long under way
HELD = 1 << 21  # bytes that a socket holds for its reader, see [Note: Wakes]
UNSENT = 1 << 19  # bytes that have yet to leave sockets, see [Note: Windows]
MORE = getattr(socket, "MSG_MORE", 0)
LATE = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
CLOSED = "Connection closed by peer"
CONGESTION = getattr(socket, "TCP_CONGESTION", 13)

Memory: TypeAlias = memoryview
NONE: Memory = memoryview(b"")


class LostError(RuntimeError):
    """A message to or from `peer` failed."""

    def __init__(self, peer: int, why: object) -> None:
        super().__init__(str(why))
        self.peer = peer


class Outstanding:
    """What a transfer has yet to send, in bytes, and to read, in messages."""

    def __init__(self, asked: tuple[int, int, int], unsent: int, unread: int) -> None:
        self.asked, self.unsent, self.unread = asked, unsent, unread


class Stream:
    """A connection, whose frames begin with a mark of so many bytes.

    Attributes:
        events: Those that are polled for.
        full: Not all of a frame was taken, or none: another has to wait for `flush`.
        mark: The one that is or was read.
        left: Bytes of the frame that is being read; 0: it is a mark.
        due: What is read next; none of it left: a mark is here.
        waits: What is next was sent after something that has yet to come.
        ended: The other end has closed it, behind all that it had to send.
    """

    def __init__(self, peer: int, connection: socket.socket, mark: int) -> None:
        connection.setblocking(False)
        self.is_unix = connection.family == getattr(socket, "AF_UNIX", None)
        if not self.is_unix:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.number = connection, connection.fileno()
        self.events = 0
        self.full = self.waits = self.ended = False
        self.mark = self.due = memoryview(bytearray(mark))
        self.left = 0
        self._peer = peer
        # What is left of a frame that has begun to leave, and whose it is.
        self._rest: tuple[list[Memory], Outstanding] | None = None
        self._enough, self._piece = 1, CHUNK

    def suit(self, far: bool, abreast: int) -> None:
        """Suit a rank that is far away, see [Note: Windows], or one that is near.

        `abreast`: how many connections to it there are.
        """
        self._piece = FAR_PIECE if far else CHUNK
        if far and not self.is_unix:
            with suppress(OSError):  # another system, or not allowed
                if 2 * _most_held() > _most_tuned():  # Linux doubles what is asked for
                    self._hold(_most_held())
                self.connection.setsockopt(socket.IPPROTO_TCP, LATE, UNSENT // abreast)
            govern(self.connection)
        if not far and (self.is_unix or _most_held() >= HELD):
            self._hold(HELD)

    def _hold(self, nbytes: int) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def send(self, frame: Sequence[Memory], owner: Outstanding, more: bool) -> bool:
        """Send what the socket takes of a frame; returns whether that is anything.

        Nothing may be left to flush. `owner` counts what has yet to leave of what is
        behind the mark.
        """
        try:
            count = self.connection.sendmsg(frame, (), MORE if more else 0)
        except BlockingIOError:
            self.full = True
            return False
        except OSError as error:
            raise LostError(self._peer, error) from None
        *mark, piece = frame
        left = sum(map(len, frame)) - count
        owner.unsent -= max(0, len(piece) - left)
        if left > len(piece):
            self._rest = [mark[0][count:], piece], owner
        elif left:
            self._rest = [piece[len(piece) - left :]], owner
        self.full = left > 0
        return True

    def flush(self) -> None:
        """Send the rest of a frame, after which another may begin."""
        self.full = False
        if self._rest is not None:
            rest, self._rest = self._rest, None
            if not self.send(*rest, more=False):
                self._rest = rest

    def receive(self) -> int:
        """Fill what is due, and the mark behind a frame; returns how many bytes."""
        due = self.due
        try:
            if len(due) == self.left:
                count, *_ = self.connection.recvmsg_into([due, self.mark])
            else:
                count = self.connection.recv_into(due)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LostError(self._peer, error) from None
        self.ended = not count
        if self.ended and (self.left or len(due) < len(self.mark)):
            raise LostError(self._peer, CLOSED)  # the rest never comes
        return count

    def await_more(self, behind: int) -> None:
        """Have this thread be woken by a piece, or by as much of a long one.

        `behind` the mark that is due there are so many bytes.
        """
        enough = len(self.due) + (0 if self.left else behind)
        enough = max(min(enough, self._piece), 1)
        if enough != self._enough and sys.platform == "linux":
            self._enough = enough
            with suppress(OSError):  # the next read tells what is the matter
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough
                )


@cache
def governed() -> bool:
    """Whether this process may have connections be governed by BBR."""
    with socket.socket() as own:
        return govern(own)


def govern(connection: socket.socket) -> bool:
    """Have a connection be governed by BBR; whether that is allowed."""
    with suppress(OSError):  # another system, or not allowed
        connection.setsockopt(socket.IPPROTO_TCP, CONGESTION, b"bbr")
        return True
    return False


def _most_held() -> int:
    """Bytes that a system lets those ask for whose socket holds what is sent."""
    return _told("core/wmem_max")


def _most_tuned() -> int:
    """Bytes that a system gives to a socket of TCP by itself."""
    return _told("ipv4/tcp_wmem")


@cache
def _told(name: str) -> int:
    """The last number of one of a system's settings; 0 if it does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int((Path("/proc/sys/net") / name).read_text().split()[-1])
    return 0
