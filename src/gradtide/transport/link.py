"""The connection to one rank: frames of several items' messages, one behind the other.

[Note: Frames] A rank may begin its next work items sooner than another, while one is at
work that has more to ask. All of them share a connection: it carries as much as there
is to send, and TCP knows its way. What an item sends travels in frames, and each says
of which item it is. What comes for an item that has not asked for it is kept, while
others have to be read behind it; if there are none, it stays in the socket (guard:
tests/transport/test_link.py).

[Note: Marks] A frame begins with the numbers of its item and request, a digest of the
item's name, the length of the whole message, and its own. Ranks that ask for different
things are told so: they would otherwise take one's bytes for the other's. Requests are
numbered for each group of ranks by itself, as only these agree on what they ask for.

[Note: Nothing blocks] Sockets hold what has been sent and not been read. A rank whose
transfer has ended may go on while its peers still read what it sent.

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
import struct
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

CHUNK = 1 << 18  # bytes of a piece at the most: what is added is still in cache
FAR_PIECE = 1 << 14  # those for which a thread is woken, where they are long under way
HELD = 1 << 21  # bytes that a socket holds for its reader, see [Note: Wakes]
FRAMES = HELD, CHUNK  # bytes of a frame at the most: between near ranks, and far ones
UNSENT = 1 << 19  # bytes that have yet to leave a socket, see [Note: Windows]
MARK = struct.Struct("!QQIQI")  # item, request, name, lengths: see [Note: Marks]
MORE = getattr(socket, "MSG_MORE", 0)
BY_TCP = getattr(socket, "TCP_NOTSENT_LOWAT", 25), getattr(socket, "TCP_CONGESTION", 13)
DIFFERENT = "ranks ask for different things"

Memory: TypeAlias = memoryview
Asked: TypeAlias = tuple[int, int, int]  # an item, its request, its name's digest
NONE: Memory = memoryview(b"")


class Arrival(NamedTuple):
    """What is to come from a rank, for one request.

    Of `memories`, none of them empty, the next one is asked for when one is full.
    """

    nbytes: int
    memories: Iterator[Memory]


class LostError(RuntimeError):
    """A message to or from `peer` failed."""

    def __init__(self, peer: int, why: object) -> None:
        super().__init__(str(why))
        self.peer = peer


class Outstanding:
    """What a transfer has yet to send, in bytes, and to read, in messages."""

    def __init__(self, asked: Asked, unsent: int, unread: int) -> None:
        self.asked, self.unsent, self.unread = asked, unsent, unread


class Coming:
    """A message that is to be read from a link for a transfer."""

    def __init__(self, peer: int, arrival: Arrival, owner: Outstanding) -> None:
        self.item = owner.asked[0]
        self._said = *owner.asked, arrival.nbytes
        self._peer, self._owner, self._left = peer, owner, arrival.nbytes
        self._memories = arrival.memories
        self.due = next(self._memories)  # the rest of what is filled now; at last none

    def check(self, said: tuple[int, ...], nbytes: int) -> None:
        """Raise LostError if a frame is not of what is due."""
        if said == self._said and nbytes <= self._left:
            return
        (item, request, _, whole), (mine, own, _, due) = said, self._said
        raise LostError(
            self._peer,
            f"{DIFFERENT}: rank {self._peer} sent item {item}, request {request} of "
            f"{whole} bytes, where item {mine}, request {own} of {due} bytes was due",
        )

    def filled(self, count: int) -> bool:
        """So many bytes of `due` are here; returns whether those are all of it."""
        self._left -= count
        self.due = self.due[count:]
        if self.due:
            return False
        self.due = next(self._memories, NONE)
        if not self.due:
            self._owner.unread -= 1
        return True

    def fill(self, memory: Memory) -> None:
        """Take what was kept elsewhere."""
        while memory:
            count = min(len(memory), len(self.due))
            self.due[:count] = memory[:count]
            memory = memory[count:]
            self.filled(count)


class _Kept(NamedTuple):
    """A frame that came before it was asked for: what its mark said, and its bytes."""

    said: tuple[int, ...]
    memory: Memory


class Link:
    """The connection to one rank, and what is to be read from it."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._is_unix = connection.family == getattr(socket, "AF_UNIX", None)
        if not self._is_unix:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer, self.connection = peer, connection
        self.number = connection.fileno()
        self.coming: dict[int, deque[Coming]] = {}  # by items; no deque is empty
        self.events = 0  # that are polled for
        self._first = 0  # the first item that may yet ask for something
        self._kept: dict[int, deque[_Kept]] = {}  # by their items
        self._mark = memoryview(bytearray(MARK.size))
        self._left = 0  # bytes of the frame that is being read; 0: it is a mark
        self._due = self._mark  # what is read next; none of it left: a mark is here
        self._into: Coming | _Kept = _Kept((), NONE)
        # What is left of a frame that has begun to leave, and whose it is.
        self._rest: tuple[list[Memory], Outstanding] | None = None
        self._enough, self._piece, self._frame = 1, CHUNK, HELD

    def suit(self, far: bool) -> None:
        """Suit a rank that is far away, see [Note: Windows], or one that is near."""
        self._piece = FAR_PIECE if far else CHUNK
        self._frame = FRAMES[far]
        if far and not self._is_unix:
            unsent, congestion = BY_TCP
            with suppress(OSError):  # another system, or not allowed
                if 2 * _most_held() > _most_tuned():  # Linux doubles what is asked for
                    self._hold(_most_held())
                self.connection.setsockopt(socket.IPPROTO_TCP, unsent, UNSENT)
                self.connection.setsockopt(socket.IPPROTO_TCP, congestion, b"bbr")
        if not far and (self._is_unix or _most_held() >= HELD):
            self._hold(HELD)

    def _hold(self, nbytes: int) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def send(self, memory: Memory, whole: int, owner: Outstanding, more: bool) -> int:
        """Begin to send a part of a message of `whole` bytes.

        Returns how many bytes are on their way, or leave with the next `flush`. Nothing
        may be left to flush.
        """
        taken = 0
        while taken < len(memory) and self._rest is None:
            piece = memory[taken : taken + self._frame]
            mark = memoryview(MARK.pack(*owner.asked, whole, len(piece)))
            if not self._push([mark, piece], owner, more):
                break
            taken += len(piece)
        return taken

    def flush(self) -> bool:
        """Send the rest of a frame; returns whether none is left."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            if not self._push(*rest, more=False):
                self._rest = rest
        return self.flushed

    @property
    def flushed(self) -> bool:
        """Whether another frame may begin."""
        return self._rest is None

    def _push(self, frame: list[Memory], owner: Outstanding, more: bool) -> bool:
        """Send what the socket takes of a frame; returns whether that is anything."""
        try:
            count = self.connection.sendmsg(frame, (), MORE if more else 0)
        except BlockingIOError:
            return False
        except OSError as error:
            raise LostError(self.peer, error) from None
        *mark, piece = frame
        left = sum(map(len, frame)) - count
        owner.unsent -= max(0, len(piece) - left)
        if left > len(piece):
            self._rest = [mark[0][count:], piece], owner
        elif left:
            self._rest = [piece[len(piece) - left :]], owner
        return True

    def expect(self, coming: Coming, early: bool) -> None:
        """Have a message be read; what of it came early is here at once.

        Unless it is asked for `early`, earlier items have asked for all they want.
        """
        self.coming.setdefault(coming.item, deque()).append(coming)
        if not early:
            self._first = coming.item
            for kept in self._kept.values():
                self._refuse_past(kept[0])
        self._hand_over(coming.item)

    def read(self) -> None:
        """Read what is here, up to a piece's end: the next one wakes the thread."""
        while self.coming:
            if not self._due:
                self._begin_frame()
            count = self._receive()
            if not count or self._take(count):
                return

    def _receive(self) -> int:
        """Fill what is due, and the mark behind a frame; returns how many bytes."""
        due = self._due
        try:
            if len(due) == self._left:
                count, *_ = self.connection.recvmsg_into([due, self._mark])
            else:
                count = self.connection.recv_into(due)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LostError(self.peer, error) from None
        if not count:
            raise LostError(self.peer, "Connection closed by peer")
        return count

    def _begin_frame(self) -> None:
        *said, self._left = MARK.unpack(self._mark)
        item = said[0]
        waiting = self.coming.get(item)
        if waiting:
            self._into = waiting[0]
            self._into.check(tuple(said), self._left)
            self._due = self._into.due[: self._left]
            return
        self._into = _Kept(tuple(said), memoryview(bytearray(self._left)))
        self._refuse_past(self._into)
        self._due = self._into.memory

    def _take(self, count: int) -> bool:
        """So many bytes have come; returns whether there is a piece to act on.

        Nobody waits for a message's end in this way: who does asks the transfer.
        """
        due, self._due = self._due, self._due[count:]
        if not self._left:
            return False
        into, acts, read = self._into, False, min(count, len(due))
        self._left -= read
        if isinstance(into, Coming):
            acts = into.filled(read) and bool(into.due)
            if self._left:
                self._due = into.due[: self._left]
        if not self._left:
            self._due = self._mark[count - read :]
            self._end_frame(into)
        return acts

    def _end_frame(self, into: Coming | _Kept) -> None:
        if isinstance(into, _Kept):
            item = into.said[0]
            self._kept.setdefault(item, deque()).append(into)
            self._hand_over(item)
        elif not into.due:
            self._ended(into.item)

    def _hand_over(self, item: int) -> None:
        """Give what was kept for an item to who has asked for it."""
        kept = self._kept.get(item)
        while kept and item in self.coming:
            said, memory = kept.popleft()
            coming = self.coming[item][0]
            coming.check(said, len(memory))
            coming.fill(memory)
            if not coming.due:
                self._ended(item)
        if not kept:
            self._kept.pop(item, None)

    def _ended(self, item: int) -> None:
        self.coming[item].popleft()
        if not self.coming[item]:
            del self.coming[item]

    def _refuse_past(self, kept: _Kept) -> None:
        """Raise LostError if nobody will ask for what has come."""
        if kept.said[0] < self._first and kept.said[0] not in self.coming:
            waiting = self.coming.get(self._first) or next(iter(self.coming.values()))
            waiting[0].check(kept.said, len(kept.memory))

    def await_more(self) -> None:
        """Have this thread be woken by a piece, or by as much of a long one."""
        enough = len(self._due)
        if not self._left:
            enough += min(len(each[0].due) for each in self.coming.values())
        enough = min(enough, self._piece)
        if enough != self._enough and sys.platform == "linux":
            self._enough = enough
            with suppress(OSError):  # the next read tells what is the matter
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough
                )


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
