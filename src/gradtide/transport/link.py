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

[Note: Several] Where there are several connections to a rank, each frame travels on one
that takes it. They are numbered, and handed over in the order in which they were sent,
so that an answer is the same however many connections there are; those that come before
their turn are kept, as long as they are not too many. A packet that is lost makes one
connection slow, and not the link, where TCP is not governed by BBR; and each has a
window of its own.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from gradtide.transport.stream import (
    CHUNK,
    CLOSED,
    HELD,
    NONE,
    LostError,
    Memory,
    Outstanding,
    Stream,
)

FRAMES = HELD, CHUNK  # bytes of a frame at the most: between near ranks, and far ones
PARTS = 1 << 13, 1 << 16  # those of one of several connections, at the least and most
AHEAD = 1 << 23  # bytes that are kept before their turn
# A frame's number, item, request, name, and the lengths: see [Note: Marks].
MARK = struct.Struct("!QQQIQI")
DIFFERENT = "ranks ask for different things"

Asked: TypeAlias = tuple[int, int, int]  # an item, its request, its name's digest


class Arrival(NamedTuple):
    """What is to come from a rank, for one request.

    Of `memories`, none of them empty, the next one is asked for when one is full. A
    `short` one has a single memory, of which the sender decides how much it fills.
    """

    nbytes: int
    memories: Iterator[Memory]
    short: bool = False


class Coming:
    """A message that is to be read from a link for a transfer."""

    def __init__(self, peer: int, arrival: Arrival, owner: Outstanding) -> None:
        self.item = owner.asked[0]
        self._said: tuple[int, ...] = *owner.asked, arrival.nbytes
        self._peer, self._owner, self._left = peer, owner, arrival.nbytes
        self._memories, self._short = arrival.memories, arrival.short
        self.due = next(self._memories)  # the rest of what is filled now; at last none

    @property
    def least(self) -> int:
        """Bytes of what is due that are sure to come."""
        return 0 if self._short else len(self.due)

    def accept(self, said: tuple[int, ...], nbytes: int) -> None:
        """Take a frame for one of what is due; raise LostError if it is not.

        The first one of a short message tells how long that is.
        """
        *asked, length = said
        if self._short and tuple(asked) == self._said[:-1] and length <= self._left:
            self._short, self._said, self._left = False, said, length
            self.due = self.due[:length]
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
    """A frame that came before its turn, or before it was asked for, and its bytes.

    `said`: what its mark told of it.
    """

    turn: int
    said: tuple[int, ...]
    memory: Memory


class Link:
    """The connections to one rank, and what is to be read from them."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.streams = [Stream(peer, connection, MARK.size)]
        self.coming: dict[int, deque[Coming]] = {}  # by items; no deque is empty
        self._frame = HELD
        self._next = 0  # of the streams, which gets the next frame if it is not full
        self._sent = self._turn = 0  # frames that have left, and that have come in turn
        self._first = 0  # the first item that may yet ask for something
        self._into: dict[Stream, Coming | _Kept] = {}  # what they fill
        self._ahead: dict[int, _Kept] = {}  # frames that are here, by their numbers
        self._held = 0  # bytes of these and of those that are being read
        self._kept: dict[int, deque[_Kept]] = {}  # whose turn has come, by items

    @property
    def connection(self) -> socket.socket:
        """The first connection."""
        return self.streams[0].connection

    def add(self, connection: socket.socket) -> Stream:
        """Have one more connection, before the next `suit`."""
        stream = Stream(self.peer, connection, MARK.size)
        self.streams.append(stream)
        return stream

    def suit(self, far: bool) -> None:
        """Suit a rank that is far away, or one that is near."""
        self._frame = FRAMES[far]
        for stream in self.streams:
            stream.suit(far, len(self.streams))

    def send(self, memory: Memory, whole: int, owner: Outstanding, more: bool) -> int:
        """Begin to send a part of a message of `whole` bytes.

        Returns how many bytes are on their way, or leave with the next `flush`.
        """
        taken, several = 0, len(self.streams) > 1
        nbytes = self._share(len(memory)) if several else self._frame
        while taken < len(memory):
            stream = self._free()
            if stream is None:
                break
            piece = memory[taken : taken + nbytes]
            mark = MARK.pack(self._sent, *owner.asked, whole, len(piece))
            # More that follows may do so on another connection.
            if stream.send([memoryview(mark), piece], owner, more and not several):
                self._sent += 1
                taken += len(piece)
        return taken

    def _share(self, nbytes: int) -> int:
        """Bytes of a frame of a message that several connections share."""
        least, most = PARTS
        return max(least, min(-(-nbytes // len(self.streams)), most))

    def _free(self) -> Stream | None:
        """A connection that may take a frame, of one after the other."""
        for _ in self.streams:
            stream = self.streams[self._next]
            self._next = (self._next + 1) % len(self.streams)
            if not stream.full:
                return stream
        return None

    def flush(self) -> bool:
        """Send the rests of frames; returns whether none is left."""
        for stream in self.streams:
            if stream.full:
                stream.flush()
        return self.flushed

    @property
    def flushed(self) -> bool:
        """Whether nothing is left to flush."""
        return not any(stream.full for stream in self.streams)

    @property
    def open(self) -> bool:
        """Whether another frame may begin."""
        return not all(stream.full for stream in self.streams)

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

    def read(self, stream: Stream | None = None) -> None:
        """Read what is here, up to a piece's end: the next one wakes the thread.

        Of the first connection, if none is named.
        """
        stream = stream or self.streams[0]
        while self.coming:
            begun = bool(stream.due) or self._begin_frame(stream)
            count = stream.receive() if begun else 0
            # What is next may come on another one, if that does not wait for it, too.
            if not count and all(each.ended or each.waits for each in self.streams):
                raise LostError(self.peer, CLOSED)
            if not count or self._take(stream, count):
                return

    def _begin_frame(self, stream: Stream) -> bool:
        """A mark is here; returns whether what is behind it may be read."""
        turn, *said, nbytes = MARK.unpack(stream.mark)
        in_turn = turn == self._turn
        waiting = self.coming.get(said[0]) if in_turn else None
        if waiting:
            self._into[stream] = waiting[0]
            waiting[0].accept(tuple(said), nbytes)
            stream.due = waiting[0].due[:nbytes]
        else:
            stream.waits = not in_turn and self._held + nbytes > AHEAD
            if stream.waits:
                return False
            kept = _Kept(turn, tuple(said), memoryview(bytearray(nbytes)))
            if in_turn:
                self._refuse_past(kept)
            self._held += nbytes
            self._into[stream], stream.due = kept, kept.memory
        stream.left = nbytes
        return True

    def _take(self, stream: Stream, count: int) -> bool:
        """So many bytes have come; returns whether there is a piece to act on.

        Nobody waits for a message's end in this way: who does asks the transfer.
        """
        due, stream.due = stream.due, stream.due[count:]
        if not stream.left:
            return False
        into, acts, read = self._into[stream], False, min(count, len(due))
        stream.left -= read
        if isinstance(into, Coming):
            acts = into.filled(read) and bool(into.due)
            if stream.left:
                stream.due = into.due[: stream.left]
        if not stream.left:
            stream.due = stream.mark[count - read :]
            self._end_frame(into)
        return acts

    def _end_frame(self, into: Coming | _Kept) -> None:
        if isinstance(into, _Kept):
            self._ahead[into.turn] = into
        else:
            self._turn += 1
            if not into.due:
                self._ended(into.item)
        while self._turn in self._ahead:
            kept = self._ahead.pop(self._turn)
            self._turn += 1
            self._held -= len(kept.memory)
            if self.coming:
                self._refuse_past(kept)
            item = kept.said[0]
            self._kept.setdefault(item, deque()).append(kept)
            self._hand_over(item)
        for stream in self.streams:
            stream.waits = False

    def _hand_over(self, item: int) -> None:
        """Give what was kept for an item to who has asked for it."""
        kept = self._kept.get(item)
        while kept and item in self.coming:
            _, said, memory = kept.popleft()
            coming = self.coming[item][0]
            coming.accept(said, len(memory))
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
            waiting[0].accept(kept.said, len(kept.memory))

    def await_more(self, stream: Stream) -> None:
        """Have this thread be woken by a piece, or by as much of a long one."""
        behind = 0
        if len(self.streams) == 1:
            behind = min(each[0].least for each in self.coming.values())
        stream.await_more(behind)
