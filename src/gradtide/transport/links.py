"""Messages between ranks, as streams of bytes.

Gloo has a thread that reads what arrives, and tells the one that waits. Here the one
that waits reads for itself, so that a message wakes one thread and not two.

[Note: Order] Several work items may be under way at once, each on a *track* of its own:
each fills the gaps of the others. Of all that may leave, what is the earliest item's
goes first; of an item's transfers the first one leaves whole before the next one. What
is for several ranks goes to one after the other, so that each link carries one message
at a time; where ranks are far apart to all at once.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtide.core.ops import Group
from gradtide.transport.link import Arrival, Asked, Coming, Link
from gradtide.transport.opening import Meeting
from gradtide.transport.stream import CHUNK, LostError, Memory, Outstanding, Stream

TRACKS = 3  # work items under way at once: of two rings that end together none is left
FAR_TRACKS = 6  # the same where ranks are far apart: a link is not to wait for answers
LANES = TRACKS, 1, 1  # of a queue: how many items of each are under way at once
LOOK = 2.0  # seconds after which a socket is read that was not said to be readable


class Transfer(Outstanding):
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
        self.track, self.early, self._after = track, False, after
        self.leaving = leaving
        self.peers = {peer for peer, _ in leaving} | arriving.keys()
        lengths = {peer: len(memory) for peer, memory in leaving}
        if unsent is None:
            unsent = sum(lengths.values())
        # Of a message to one rank alone more may follow.
        self.lengths = lengths if len(lengths) > 1 else dict.fromkeys(lengths, unsent)
        due = {peer: each for peer, each in arriving.items() if each.nbytes}
        super().__init__(track.asked, unsent, len(due))
        self.coming = {peer: Coming(peer, each, self) for peer, each in due.items()}

    def here(self) -> bool:
        """Whether nothing is left to wait for."""
        return not (self.unsent or self.unread)

    def finish(self, drained: Callable[[], None]) -> None:
        """Wait for all of it; `drained` is called once all has left."""
        self.track.links.drive(self, drained)
        self._after()


class Track:
    """What every n-th work item of a lane has under way, see [Note: Order]."""

    def __init__(self, links: Links) -> None:
        self.links = links
        # The item, its request that transfers are made for, and its name's digest.
        self.asked: Asked = 0, 0, 0
        self.sending: deque[Transfer] = deque()
        self.later: deque[Transfer] = deque()
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
        while self.sending:
            transfer = self.sending[0]
            self._send(transfer)
            if transfer.unsent:  # the rest has to be taken, or has yet to arrive
                return
            self.sending.popleft()

    def _send(self, transfer: Transfer) -> None:
        leaving, kept = transfer.leaving, deque[tuple[int, Memory]]()
        links, blocked = self.links, self.links.blocked
        while leaving:
            peer, memory = leaving.popleft()
            link = links.to[peer]
            if link.open:
                more = bool(leaving) and leaving[0][0] == peer
                count = link.send(memory, transfer.lengths[peer], transfer, more)
                memory = memory[count:]
                if not link.flushed:
                    blocked.add(link)
            if memory:
                kept.append((peer, memory))
            if not (link.open or links.far):
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
        self._meeting, self._lane = meeting, lane
        self._tracks = [Track(self) for _ in range(abreast)]
        self.far, self._streams = False, 1
        self.to: dict[int, Link] = {}  # by the ranks' numbers in the transport's group
        self.blocked: set[Link] = set()  # that have to take what is left
        self._numbers: dict[int, tuple[Link, Stream]] = {}  # by those of their sockets
        self._poll = select.poll()
        self._bell = (
            -1
        )  # the number of the socket that `wake` writes to, if there is one
        self._seconds, self._idle = seconds, 0.0

    def suit(self, far: bool, streams: int = 1) -> None:
        """Suit ranks that are far apart, or that are near; nothing is under way.

        `streams`: how many connections there are to a rank, on every rank alike. It is
        one to a rank that is reached without a network.
        """
        self.far, self._streams = far, streams
        for peer in self._in_turn(self.to.keys()):
            self._widen(peer)
        if far:
            self._tracks = [Track(self) for _ in range(FAR_TRACKS)]
            self._heard, self._ringing = socket.socketpair()
            for end in (self._heard, self._ringing):
                end.setblocking(False)
            self._meeting.keep(self._heard, self._ringing)
            self._bell = self._heard.fileno()
            self._poll.register(self._bell, select.POLLIN)

    def wake(self) -> None:
        """Have the thread that waits here look whether there is more to begin.

        Any thread of ranks that are far apart may call this.
        """
        with suppress(OSError):  # it rings already, or all is over
            self._ringing.send(b"!")

    @property
    def unread(self) -> list[int]:
        """The ranks of which something is to be read; any thread may ask."""
        return [link.peer for link in [*self.to.values()] if link.coming]

    def track(self, number: int) -> Track:
        """That of the item of this number."""
        return self._tracks[number % len(self._tracks)]

    def add(self, transfer: Transfer, early: bool) -> None:
        """Have a transfer begin.

        If it is `early`, others may wait for what comes before it: where it has to wait
        for connections it begins when it is waited for, or when the next one does that
        may wait: transfers of a track keep their order.
        """
        track, transfer.early = transfer.track, early
        track.later.append(transfer)
        if not early or (len(track.later) == 1 and transfer.peers <= self.to.keys()):
            self._enter_all(track)
            self._send()

    def drive(self, transfer: Transfer, drained: Callable[[], None]) -> None:
        """Send and read until a transfer is through."""
        track, self._idle = transfer.track, 0.0
        self._enter_all(track)
        while True:
            self._send()
            # Near ranks pass on what arrives before they begin more.
            if not (self.blocked if self.far else track.sending):
                drained()
            if transfer.here():
                return
            self._wait(transfer)

    def _send(self) -> None:
        """Send what the sockets take, of the earliest item first."""
        if self.blocked:
            self.blocked = {link for link in self.blocked if not link.flush()}
        sending = [track for track in self._tracks if track.sending]
        for track in sorted(sending, key=lambda track: track.sending[0].asked):
            track.send()

    def _enter_all(self, track: Track) -> None:
        while track.later:
            self._enter(track.later.popleft())

    def _enter(self, transfer: Transfer) -> None:
        for peer in self._in_turn(transfer.peers - self.to.keys()):
            self._connect(peer)
        if transfer.unsent:
            transfer.track.sending.append(transfer)
        for peer, coming in transfer.coming.items():
            self.to[peer].expect(coming, transfer.early)

    def _in_turn(self, peers: Iterable[int]) -> list[int]:
        """Calls first, from the highest on: they wait for nobody."""
        calls = self._meeting.calls
        return sorted(peers, key=lambda peer: (calls(peer), peer), reverse=True)

    def _connect(self, peer: int) -> None:
        (connection,) = self._meet(peer, range(1))
        link = self.to[peer] = Link(peer, connection)
        self._numbers[link.streams[0].number] = link, link.streams[0]
        self._widen(peer)

    def _widen(self, peer: int) -> None:
        """Have as many connections to a rank as there are to be, and suit them."""
        link = self.to[peer]
        more = 1 if link.streams[0].is_unix else self._streams
        for connection in self._meet(peer, range(len(link.streams), more)):
            stream = link.add(connection)
            self._numbers[stream.number] = link, stream
        link.suit(self.far)

    def _meet(self, peer: int, numbers: Sequence[int]) -> list[socket.socket]:
        """Call a rank, or be called, for connections with such numbers."""
        lanes = [self._lane + len(LANES) * number for number in numbers]
        meeting = self._meeting
        try:
            if not meeting.calls(peer):
                return [meeting.answer(peer, lane) for lane in lanes]
            if len(lanes) < 2:
                return [meeting.call(peer, lane) for lane in lanes]
            # A call takes a round trip.
            with ThreadPoolExecutor(len(lanes)) as pool:
                return [*pool.map(lambda lane: meeting.call(peer, lane), lanes)]
        except OSError as error:
            raise LostError(peer, error) from None

    def _wait(self, transfer: Transfer) -> None:
        """Wait until something can be sent or read, and read it.

        A transfer is driven, and a link that it waits for is to move within the
        time-out: what others send for later items is no sign of that.
        """
        for number, (link, stream) in self._numbers.items():
            events = select.POLLOUT if stream.full else 0
            if link.coming and not (stream.waits or stream.ended):
                link.await_more(stream)
                events |= select.POLLIN
            if events != stream.events:
                stream.events = events
                if events:
                    self._poll.register(number, events)
                else:  # also of one that is closed nobody wants to know
                    self._poll.unregister(number)
        look, begin = min(LOOK, self._seconds - self._idle), time.monotonic()
        ready = [number for number, _ in self._poll.poll(1e3 * look)]
        self._idle += min(time.monotonic() - begin, look) if ready else look
        if any(self._is_due(transfer, number) for number in ready):
            self._idle = 0.0
        if self._idle >= self._seconds:
            raise self._late(transfer)
        if self._bell in ready:
            ready.remove(self._bell)
            with suppress(OSError):
                self._heard.recv(CHUNK)
            if not ready:
                return
        for number in ready or self._numbers:
            link, stream = self._numbers[number]
            link.read(stream)

    def _is_due(self, transfer: Transfer, number: int) -> bool:
        """Whether a transfer waits for the rank behind a socket."""
        link, _ = self._numbers.get(number, (None, None))
        if link is None or link.peer not in transfer.peers:  # None: the bell
            return False
        coming = transfer.coming.get(link.peer)
        return link in self.blocked or (coming is not None and bool(coming.due))

    def _late(self, transfer: Transfer) -> LostError:
        due = [peer for peer, coming in transfer.coming.items() if coming.due]
        waiting = [*due, *(peer for peer, _ in transfer.leaving), *self.unread]
        waiting += (link.peer for link in self.blocked)
        return LostError(waiting[0], f"Timed out after {self._seconds:g} s")


def arrival(x: Tensor, short: bool = False) -> Arrival:
    """A tensor that is to come as a whole, or only its beginning if it may be short."""
    return Arrival(x.nbytes, iter([memory_of(x)]), short)


def memory_of(x: Tensor) -> Memory:
    """The bytes of a tensor in host memory."""
    array: Any = x.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
