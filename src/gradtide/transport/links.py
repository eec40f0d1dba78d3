"""Messages between ranks, as streams of bytes: a TCP connection for each two of them.

Gloo has a thread that reads what arrives, and tells the one that waits. Here the one
that waits reads for itself, so that a message wakes one thread and not two.

[Note: Order] A connection carries messages in the order of their transfers. A rank may
begin its next work items sooner than another, while one is at work that has more to
ask: items that are under way at once have connections of their own, their *tracks*, and
so each fills the gaps of the others (guard: tests/test_transport.py,
test_many_messages_keep_order). Of transfers that travel together the first one leaves
whole before the next one. What is for several ranks goes to one after the other, so
that each link carries one message at a time; where ranks are far apart to all at once.

[Note: Marks] What a transfer sends to a rank begins with the numbers of its item and
request, a digest of the item's name, and its length. Ranks that ask for different
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
ranks are woken for less. What a connection has learned of its way is also forgotten
when it is idle, as between steps it is, and a packet that is lost makes it slow, unless
it is governed by BBR (Cardwell et al., ACM Queue 2016), where the system allows that.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtide.core.ops import Group
from gradtide.transport.opening import Meeting

CHUNK = 1 << 18  # bytes of a piece at the most: what is added is still in cache
FAR_PIECE = 1 << 14  # the same, where a message is long under way
HELD = 1 << 21  # bytes that a socket holds for its reader, see [Note: Wakes]
TRACKS = 3  # work items under way at once: of two rings that end together none is left
LOOK = 2.0  # seconds after which a socket is read that was not said to be readable

MARK = struct.Struct("!QQIQ")  # item, request, name, bytes: see [Note: Marks]
MORE = getattr(socket, "MSG_MORE", 0)

Memory: TypeAlias = memoryview


DIFFERENT = "ranks ask for different things"


class Arrival(NamedTuple):
    """What is to come from a rank, for one request.

    Of `memories`, none of them empty, the next one is asked for when one is full.
    """

    nbytes: int
    memories: Iterator[Memory]


class _Coming(NamedTuple):
    """What is to be read from a link for a transfer, its mark first."""

    transfer: Transfer
    mark: Memory
    memories: Iterator[Memory]
    enough: int  # bytes of the mark, and of what is filled first


class LostError(RuntimeError):
    """A message to or from `peer` failed."""

    def __init__(self, peer: int, why: object) -> None:
        super().__init__(str(why))
        self.peer = peer


class Link:
    """The connection to one rank, and what is to be read from it."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        is_unix = connection.family == getattr(socket, "AF_UNIX", None)
        if not is_unix:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_unix or _most_held() >= HELD:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD)
        self.peer, self.connection = peer, connection
        self.number = connection.fileno()
        self.coming: deque[_Coming] = deque()
        self.events = 0  # that are polled for
        self._due: Memory | None = None  # of the first, what is being filled
        self._enough, self._piece = 1, CHUNK

    def suit_delay(self) -> None:
        """Suit a rank that is far away, see [Note: Windows]."""
        self._piece = FAR_PIECE
        if self.connection.family != getattr(socket, "AF_UNIX", None):
            with suppress(OSError, AttributeError):  # not allowed, or another system
                self.connection.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr"
                )

    def send(self, memory: Memory, more: bool) -> int:
        """Send as much as the socket takes; returns how many bytes that was."""
        try:
            return self.connection.send(memory, MORE if more else 0)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LostError(self.peer, error) from None

    def read(self) -> None:
        """Read what is there."""
        while self.coming:
            transfer, mark, memories, _ = self.coming[0]
            is_mark = self._due is None
            due = self._due or mark
            try:
                count = self.connection.recv_into(due)
            except BlockingIOError:
                return
            except OSError as error:
                raise LostError(self.peer, error) from None
            if not count:
                raise LostError(self.peer, "Connection closed by peer")
            if count < len(due):
                self._due = due[count:]
                return
            self._due = next(memories, None)
            if self._due is None:
                self.coming.popleft()
                transfer.unread -= 1
            elif not is_mark:  # the next piece wakes this thread when all of it is here
                return

    def await_more(self) -> None:
        """Have this thread be woken by a piece, or by as much of a long one."""
        due = self._due
        enough = self.coming[0].enough if due is None else len(due)
        enough = min(enough, self._piece)
        if enough != self._enough and sys.platform == "linux":
            self._enough = enough
            with suppress(OSError):  # the next read tells what is the matter
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough
                )


class Transfer:
    """What leaves for other ranks, and what arrives from them, for one request.

    `finish` is called once, in the order of making. `unsent` counts bytes, also those
    that join `leaving` only when they have arrived; `unread` counts ranks.
    """

    def __init__(
        self,
        track: Track,
        leaving: deque[tuple[int, Memory]],
        arriving: Mapping[int, Arrival],
        unsent: int | None = None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self.track, self._after = track, after
        self.leaving = leaving
        self.peers = {peer for peer, _ in leaving} | arriving.keys()
        sending = sum(len(memory) for _, memory in leaving)
        self.unsent = sending if unsent is None else unsent
        self.coming = {
            peer: self._due(peer, *arrival)
            for peer, arrival in arriving.items()
            if arrival.nbytes
        }
        self.unread = len(self.coming)
        self._mark()

    def _mark(self) -> None:
        """Have what is for a rank begin with its mark, see [Note: Marks]."""
        leaving = [*self.leaving] if self.unsent else []
        self.leaving.clear()
        alone = len(leaving) == 1  # more may follow it
        for peer, memory in leaving:
            nbytes = self.unsent if alone else len(memory)
            mark = memoryview(MARK.pack(*self.track.asked, nbytes))
            self.leaving.extend(((peer, mark), (peer, memory)))
        self.unsent += MARK.size * len(leaving)

    def _due(self, peer: int, nbytes: int, memories: Iterator[Memory]) -> _Coming:
        told, first = memoryview(bytearray(MARK.size)), next(memories)
        due = *self.track.asked, nbytes
        behind = _behind(told, due, peer, first, memories)
        return _Coming(self, told, behind, MARK.size + len(first))

    def here(self) -> bool:
        """Whether nothing is left to wait for."""
        return not (self.unsent or self.unread)

    def finish(self, drained: Callable[[], None]) -> None:
        """Wait for all of it; `drained` is called once all has left."""
        self.track.links.drive(self, drained)
        self._after()


def _behind(
    told: Memory,
    due: tuple[int, ...],
    peer: int,
    first: Memory,
    memories: Iterator[Memory],
) -> Iterator[Memory]:
    """What is filled behind a mark, if it is the one that is `due`."""
    sent = MARK.unpack(told)
    if sent != due:
        (item, request, _, nbytes), (mine, own, _, wanted) = sent, due
        raise LostError(
            peer,
            f"{DIFFERENT}: rank {peer} sent item {item}, request {request} of {nbytes} "
            f"bytes, where item {mine}, request {own} of {wanted} bytes was due",
        )
    yield first
    yield from memories


class Track:
    """The connections of every n-th work item of a lane, see [Note: Order]."""

    def __init__(self, links: Links, number: int) -> None:
        self.links, self.number = links, number
        # The item, its request that transfers are made for, and its name's digest.
        self.asked = 0, 0, 0
        self.to: dict[int, Link] = {}  # by the ranks' numbers in the transport's group
        self.sending: deque[Transfer] = deque()
        self.later: deque[Transfer] = deque()
        self.blocked: set[Link] = set()  # that have to take what is next
        self._scratches: dict[object, Tensor] = {}

    def scratch(self, key: object, nbytes: int) -> Tensor:
        """Memory for arrivals, kept: fresh pages would cost another pass.

        Who uses it at the same time asks with another key.
        """
        kept = self._scratches.get(key)
        if kept is None or kept.numel() < nbytes:
            kept = self._scratches[key] = torch.empty(
                nbytes, dtype=torch.uint8, device="cpu"
            )
        return kept[:nbytes]

    def send(self) -> None:
        """Send what the sockets take, of one transfer after the other."""
        self.blocked = set()
        while self.sending:
            transfer = self.sending[0]
            self._send(transfer)
            if transfer.unsent:  # the rest has to be taken, or has yet to arrive
                return
            self.sending.popleft()

    def _send(self, transfer: Transfer) -> None:
        leaving, kept = transfer.leaving, deque[tuple[int, Memory]]()
        while leaving:
            peer, memory = leaving.popleft()
            link = self.to[peer]
            if link in self.blocked:
                kept.append((peer, memory))
                continue
            more = bool(leaving) and leaving[0][0] == peer
            count = link.send(memory, more)
            transfer.unsent -= count
            if count < len(memory):
                kept.append((peer, memory[count:]))
                self.blocked.add(link)
                if not self.links.far:
                    break
        leaving.extendleft(reversed(kept))


class Peers(NamedTuple):
    """The ranks that a request is asked of, and the connections that it takes."""

    group: Group
    track: Track
    ranks: Sequence[int]  # the group's, by their numbers in the transport's


class Links:
    """A lane's connections to other ranks."""

    def __init__(
        self, meeting: Meeting, lane: int, abreast: int, seconds: float
    ) -> None:
        """`abreast`: how many of the lane's items may be under way at once.

        `seconds`: how long nothing may move while something is waited for.
        """
        self._meeting = meeting
        self._tracks = [Track(self, TRACKS * lane + i) for i in range(abreast)]
        self.far = False  # see `suit_delay`
        self._links: dict[int, Link] = {}  # by the numbers of their sockets
        self._poll = select.poll()
        self._seconds, self._idle = seconds, 0.0

    def suit_delay(self) -> None:
        """Suit ranks that are far apart."""
        self.far = True
        self._bell, self._ringing = socket.socketpair()
        for end in (self._bell, self._ringing):
            end.setblocking(False)
        self._meeting.keep(self._bell, self._ringing)
        self._poll.register(self._bell, select.POLLIN)
        for link in self._links.values():
            link.suit_delay()

    def wake(self) -> None:
        """Have the thread that waits here look whether there is more to begin.

        Any thread of ranks that are far apart may call this.
        """
        with suppress(OSError):  # it rings already, or all is over
            self._ringing.send(b"!")

    @property
    def connections(self) -> dict[int, socket.socket]:
        """One to each rank that was met, by its number."""
        return {link.peer: link.connection for link in self._links.values()}

    @property
    def unread(self) -> list[int]:
        """The ranks of which something is to be read; any thread may ask."""
        return [link.peer for link in [*self._links.values()] if link.coming]

    def track(self, number: int) -> Track:
        """That of work items to which this number was given."""
        return self._tracks[number % len(self._tracks)]

    def add(self, transfer: Transfer, early: bool) -> None:
        """Have a transfer begin.

        If it is `early`, others may wait for what comes before it: where it has to wait
        for connections it begins when it is waited for, or when the next one does that
        may wait: transfers of a track keep their order.
        """
        track = transfer.track
        track.later.append(transfer)
        if not early or (len(track.later) == 1 and transfer.peers <= track.to.keys()):
            self._enter_all(track)
            track.send()

    def drive(self, transfer: Transfer, drained: Callable[[], None]) -> None:
        """Send and read until a transfer is through."""
        track = transfer.track
        self._enter_all(track)
        while True:
            for each in self._tracks:
                each.send()
            # Near ranks pass on what arrives before they begin more.
            busy = any(t.blocked for t in self._tracks) if self.far else track.sending
            if not busy:
                drained()
            if transfer.here():
                return
            self._wait()

    def _enter_all(self, track: Track) -> None:
        while track.later:
            self._enter(track.later.popleft())

    def _enter(self, transfer: Transfer) -> None:
        track = transfer.track
        calls, peers = self._meeting.calls, transfer.peers - track.to.keys()
        # Calls first, from the highest on: they wait for nobody.
        for peer in sorted(peers, key=lambda peer: (calls(peer), peer), reverse=True):
            self._connect(peer, track)
        if transfer.unsent:
            track.sending.append(transfer)
        for peer, coming in transfer.coming.items():
            track.to[peer].coming.append(coming)

    def _connect(self, peer: int, track: Track) -> None:
        meet = self._meeting.call if self._meeting.calls(peer) else self._meeting.answer
        try:
            link = Link(peer, meet(peer, track.number))
        except OSError as error:
            raise LostError(peer, error) from None
        if self.far:
            link.suit_delay()
        track.to[peer] = self._links[link.number] = link

    def _wait(self) -> None:
        """Wait until something can be sent or read, and read it."""
        blocked = set[Link]().union(*(track.blocked for track in self._tracks))
        for number, link in self._links.items():
            events = select.POLLOUT if link in blocked else 0
            if link.coming:
                link.await_more()
                events |= select.POLLIN
            if events != link.events:
                link.events = events
                if events:
                    self._poll.register(number, events)
                else:  # also of one that is closed nobody wants to know
                    self._poll.unregister(number)
        ready = [number for number, _ in self._poll.poll(1e3 * LOOK)]
        self._idle = 0.0 if ready else self._idle + LOOK
        if self._idle > self._seconds:
            raise self._late()
        if self.far and self._bell.fileno() in ready:
            ready.remove(self._bell.fileno())
            with suppress(OSError):
                self._bell.recv(CHUNK)
            if not ready:
                return
        for number in ready or self._links:
            link = self._links[number]
            if link.coming:
                link.read()

    def _late(self) -> LostError:
        waiting = self.unread
        waiting += [link.peer for track in self._tracks for link in track.blocked]
        return LostError(waiting[0], f"Timed out after {self._seconds:g} s")


@cache
def _most_held() -> int:
    """Bytes that a system lets a socket hold for its reader, if it tells."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    return 0


def arrival(x: Tensor) -> Arrival:
    """A tensor that is to come as a whole."""
    return Arrival(x.nbytes, iter([memory_of(x)]))


def memory_of(x: Tensor) -> Memory:
    """The bytes of a tensor in host memory."""
    array: Any = x.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
