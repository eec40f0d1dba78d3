"""Requests answered on a thread of its own, over links and a Gloo group of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.core import ops
from gradtide.core.levels import Members, rows
from gradtide.core.ops import Group, Op
from gradtide.core.torch_internals.distributed import timeout_of
from gradtide.core.transport import CommunicationError, Job, Progress
from gradtide.transport import ring, rotation
from gradtide.transport.comm_queue import CommQueue, WorkItem
from gradtide.transport.distance import Distance, distance_of, one_way
from gradtide.transport.fault import ALIKE
from gradtide.transport.hosts import give_up
from gradtide.transport.inquiry import Inquiry, end
from gradtide.transport.link import DIFFERENT
from gradtide.transport.links import (
    FAR_TRACKS,
    LANES,
    TRACKS,
    Links,
    Peers,
    Track,
    Transfer,
    arrival,
    memory_of,
)
from gradtide.transport.opening import Meeting
from gradtide.transport.several import Wish, agreed, wish

SMALL, FEW = 1 << 14, 32  # bytes and ranks up to which all is sent to everybody
HOP = 1 << 17  # bytes of a part up to which one hop beats a ring of P - 1
LOOKS = 3  # messages by which the system learns how far ranks are


class GlooTransport:
    """Links between ranks, and torch's Gloo where its own collectives are as good.

    The queue is a thread: waiting blocks it and not the training thread, so every
    request gets the future that Gloo lacks for most of them.
    """

    def __init__(
        self, pg: dist.ProcessGroup, meeting: Meeting, stores: tuple[Any, Any]
    ) -> None:
        self.group = Group(pg.rank(), pg.size())
        self.hosts: Members = rows(pg.size(), 1)
        self.progress = Progress()
        self.payload_bytes = 0
        self.distance, self.streams = Distance(), 1
        self._pg = pg
        self._queue = CommQueue(f"gradtide {pg.group_name}", TRACKS)
        self.submit = self._queue.submit
        seconds = timeout_of(pg, torch.device("cpu")).total_seconds()
        self._meeting = meeting
        self._links = tuple(Links(meeting, *lane, seconds) for lane in enumerate(LANES))
        self._inquiry = Inquiry(pg, self._queue, self.progress, meeting, stores)
        self._queue.late = self._inquiry.late
        links = self._links  # whose threads must not keep this transport
        self._inquiry.unread = lambda: {peer for own in links for peer in own.unread}
        meeting.silent = self._inquiry.silent
        self._at_exit = Finalize(self, end, args=(self._inquiry,), exitpriority=1)

    def meet(self) -> None:
        """Find out how far apart the ranks are; all of them call this."""
        if self.group.size == 1:
            return
        rank, size = self.group

        def ask() -> None:
            own = torch.zeros(1, dtype=torch.uint8, device="cpu")
            for _ in range(LOOKS):
                self.wait(self.issue(ops.AllGather(own)))

        self.submit(Job(lambda: None, ask, name="meeting")).join()
        met = self._links[0].to
        ways = {peer: one_way(link.connection) for peer, link in met.items()}
        own = ways.get((rank + 1) % size, 0.0), max(ways.values())
        told = self.gather_objects((own, wish(size)), "meeting")
        distance = distance_of(own for own, _ in told)
        self.streams = agreed((Wish(*wish) for _, wish in told), distance.far)

        def suit() -> None:
            try:
                self.suit(distance)
            except RuntimeError as error:  # a rank is lost meanwhile
                raise self.blame("connecting", error) from error

        self.submit(Job(lambda: None, suit, name="meeting")).join()
        self.payload_bytes = 0

    def suit(self, distance: Distance) -> None:
        """Ask as suits ranks that are this far apart; all of them know it alike.

        Nothing is under way.
        """
        self.distance = distance
        if distance.far:
            self._queue.suit_delay(_here, self._links[0].wake, FAR_TRACKS)
        self._links[0].suit(distance.far, self.streams)  # the others are inside hosts

    @property
    def delay(self) -> float:
        """Seconds that a message is under way to the next host."""
        return self.distance.hop

    @property
    def error(self) -> BaseException | None:
        """What ended the queue."""
        return self._queue.error

    @property
    def lane(self) -> int:
        """The number of this thread's lane of the queue."""
        return self._queue.lane

    @property
    def works_here(self) -> bool:
        """Whether this is one of the queue's threads."""
        return self._queue.works_here

    def issue(self, op: Op, room: Tensor | None = None) -> Any:
        """Start a request without waiting for anything.

        `room` is memory for an answer that `op` has no place for.
        """
        if self.group.size == 1:
            return alone(op), None, ""
        item = self._queue.current
        track = self._links[self._queue.lane].track(item.number)
        track.asked = item.number, _numbered(op, item), item.digest
        asked = _Asked(op, self.group, track, item, room)
        # What crosses a link is asked for by one thread, what does not by others, too.
        if not asked.inside:
            self.payload_bytes += ops.crossing(op, self.group) * self._sends(asked)
        name = ops.name_of(op)
        try:
            return *self._start(asked), name
        except RuntimeError as error:
            raise self.blame(name, error) from error

    def _start(self, asked: _Asked) -> tuple[Any, Begun | None]:
        match asked.op:
            case ops.ToHost(tensor=x):
                return x, None
            case _ if asked.group.size == 1:
                return alone(asked.op), None
            case ops.ReduceScatter():
                return self._reduce_scatter(asked.op, asked)
            case ops.AllGather():
                return self._all_gather(asked.op, asked)
            case ops.Swap():
                return self._swap(asked.op, asked)
            case ops.AllToAll():
                return self._all_to_all(asked.op, asked)
            case ops.AllReduce(tensor=x) if self._is_small(x):
                return x, self._exchange(x, asked)
            case ops.AllReduce():
                return self._all_reduce(asked.op, asked, 1)
            case ops.Mean():
                return self._all_reduce(asked.op, asked, asked.group.size)
            case ops.Broadcast(tensor=x, source=source):
                if self._is_spread(asked.op, asked):
                    return x, _spread(x, source, asked)
                return x, _Broadcast(asked.op, self._pg)
        raise AssertionError(asked.op)

    def wait(self, pending: Any) -> Any:
        answer, begun, name = pending
        if begun is not None:
            try:
                begun.finish(self._queue.begin_next)
            except RuntimeError as error:
                raise self.blame(name, error) from error
        return answer

    def _sends(self, asked: _Asked) -> int:
        op, group = asked.op, asked.group
        if isinstance(op, ops.AllReduce) and self._is_small(op.tensor):
            return (group.size - 1) * op.tensor.nbytes
        if isinstance(op, ops.Broadcast) and self._is_spread(op, asked):
            return (group.size - 1) * ops.payload_bytes(op, group)
        return ops.payload_bytes(op, group)

    def carried(self, total: float, largest: float, smallest: float) -> float:
        return ring.carried(total, largest, smallest, self.group.size)

    def gather_objects(self, value: Any, name: str = "comparing") -> list[Any]:
        if self.group.size == 1:
            return [value]
        told: list[Any] = [None] * self.group.size

        def gather() -> None:
            try:
                dist.all_gather_object(told, (name, value), group=self._pg)
            except RuntimeError as error:
                raise self.blame(name, error) from error

        self.submit(Job(lambda: None, gather, name=name)).join()
        names = {rank: other for rank, (other, _) in enumerate(told)}
        if len({*names.values()}) > 1:
            who = ", ".join(f"rank {rank} in {where}" for rank, where in names.items())
            raise CommunicationError(f"{DIFFERENT}: {who}. {ALIKE}")
        return [other for _, other in told]

    def close(self) -> None:
        ended = self._queue.close()
        self._inquiry.close("has called sync.remove(), or its wrapper is gone")
        if self._queue.error is not None:
            self._inquiry.linger_at_exit()
        self._at_exit.cancel()
        # A thread that has yet to end must not find another file by a number it knows.
        (self._meeting.close if ended else self._meeting.hang_up)()
        if self._queue.error is None:
            give_up(self._pg)
        elif ended:
            self._inquiry.give_up()

    def abandon(self) -> None:
        self._meeting.hang_up()
        self._queue.error = self._queue.error or CommunicationError(
            "the ranks have changed: what was under way is undone"
        )
        ended = self._queue.close()
        self._inquiry.close("trains with other ranks now")
        self._at_exit.cancel()
        if ended:
            self._meeting.close()

    def _reduce_scatter(
        self, op: ops.ReduceScatter, asked: _Asked
    ) -> tuple[Tensor, Begun]:
        parts = op.tensor.split_with_sizes(ops.part_sizes(op, asked.group))
        divisor = asked.group.size if op.mean else 1
        if self._in_one_hop(parts, asked):
            begun = rotation.reduce_scatter(parts, asked.peers, asked.number, divisor)
        else:
            begun = ring.reduce_scatter(parts, asked.peers, divisor)
        return parts[asked.group.rank], asked.begin(begun)

    def _all_gather(self, op: ops.AllGather, asked: _Asked) -> tuple[Tensor, Begun]:
        sizes = ops.part_sizes(op, asked.group)
        out = op.into if op.into is not None else op.tensor.new_empty(sum(sizes))
        parts = out.split_with_sizes(sizes)
        own = parts[asked.group.rank]
        if own.data_ptr() != op.tensor.data_ptr():
            own.copy_(op.tensor.flatten())
        way = rotation if self._in_one_hop(parts, asked) else ring
        begun = way.all_gather(parts, asked.peers)
        if op.into is None and op.sizes is None:
            out = out.view(asked.group.size, *op.tensor.shape)
        return out, asked.begin(begun)

    def _swap(self, op: ops.Swap, asked: _Asked) -> tuple[Tensor, Begun | None]:
        x, peer = op.tensor, op.peer
        out = asked.room_for(x, x.shape)
        if peer == asked.group.rank:
            return out.copy_(x), None
        other = asked.ranks[peer]
        leaving = deque([(other, memory_of(x.contiguous()))])
        return out, asked.begin(Transfer(asked.track, leaving, {other: arrival(out)}))

    def _all_to_all(self, op: ops.AllToAll, asked: _Asked) -> tuple[Tensor, Begun]:
        rank, x = asked.group.rank, op.tensor
        out = asked.room_for(x, (sum(op.recv), *x.shape[1:]))
        rows = zip(torch.split(x, list(op.send)), ops.sent_to(op), strict=True)
        leaving = [row.flatten()[:numel] for row, numel in rows]
        arriving = [row.view(-1) for row in torch.split(out, list(op.recv))]
        arriving[rank][: len(leaving[rank])].copy_(leaving[rank])
        short = op.used is not None
        begun = rotation.all_to_all(leaving, arriving, asked.peers, short=short)
        return out, asked.begin(begun)

    def _all_reduce(
        self, op: ops.AllReduce | ops.Mean, asked: _Asked, divisor: int
    ) -> tuple[Tensor, Begun]:
        x, peers = op.tensor, asked.peers
        parts = x.view(-1).split_with_sizes(ops.part_sizes(op, asked.group))
        if not self._in_one_hop(parts, asked):
            return x, asked.begin(ring.all_reduce(parts, peers, divisor))
        first = rotation.reduce_scatter(parts, peers, asked.number, divisor)
        half = asked.begin(first)

        def second() -> Transfer:
            return asked.begin(rotation.all_gather(parts, peers))

        return x, _Halves(half, second, self.distance.far)

    def _in_one_hop(self, parts: Sequence[Tensor], asked: _Asked) -> bool:
        """Whether waiting P - 1 times would take longer than the bytes do.

        Inside a host it always does: memory has no links that a ring keeps busy.
        """
        if asked.inside:
            return True
        most = max(part.nbytes for part in parts)
        if self.group.size > FEW:
            return False
        whole = sum(part.nbytes for part in parts)
        return most <= HOP or self.distance.direct_pays(whole, asked.group.size)

    def _is_spread(self, op: ops.Broadcast, asked: _Asked) -> bool:
        """Whether a broadcast takes one hop, which some ranks have no other way for."""
        return asked.some or self._in_one_hop([op.tensor], asked)

    def _is_small(self, x: Tensor) -> bool:
        return self.group.size <= FEW and x.nbytes <= SMALL

    def _exchange(self, x: Tensor, asked: _Asked) -> Begun:
        """Sum a small tensor in one hop: everybody sends it to everybody."""
        rank, size = asked.group
        rows = x.new_empty((size, *x.shape))
        rows[rank] = x
        # In the order of ranks, so that the sums are the same everywhere.
        begun = rotation.all_to_all(
            [rows[rank]] * size,
            rows.unbind(),
            asked.peers,
            lambda: x.copy_(rows.sum(0)),
        )
        return asked.begin(begun)

    def blame(self, request: str, error: RuntimeError) -> CommunicationError:
        """An error of torch's, which names an address at best, as one of ours."""
        if self._queue.error is not None:  # it is known already, and why
            return CommunicationError(str(error))
        return CommunicationError(self._inquiry.explain(request, error))


class _Asked:
    """A request that is being issued, among all ranks or `some`."""

    def __init__(
        self,
        op: Op,
        group: Group,
        track: Track,
        item: WorkItem,
        room: Tensor | None,
    ) -> None:
        self._room = room
        self.some, self.inside = isinstance(op, ops.Among), ops.is_inside(op)
        ranks: Sequence[int] = range(group.size)
        if isinstance(op, ops.Among):
            group, ranks, op = ops.subgroup(op, group), op.ranks, op.op
        self.op, self.group, self.track, self.ranks = op, group, track, ranks
        self.peers = Peers(group, track, ranks)
        self.number, self._early = item.requests.total(), item.early

    def room_for(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Memory for an answer like `x`."""
        return x.new_empty(shape) if self._room is None else self._room

    def begin(self, transfer: Transfer) -> Transfer:
        self.track.links.add(transfer, self._early)
        return transfer


class _Halves:
    """Two transfers, of which the second follows from the first."""

    def __init__(
        self, first: Transfer, second: Callable[[], Transfer], far: bool
    ) -> None:
        self._first, self._second, self._far = first, second, far
        self._following: Transfer | None = None

    def here(self) -> bool:
        if not self._first.here():
            return False
        return self._follow(lambda: None).here()

    def finish(self, drained: Callable[[], None]) -> None:
        # Near ranks have the rest on its way before others begin.
        self._follow(drained if self._far else lambda: None).finish(drained)

    def _follow(self, drained: Callable[[], None]) -> Transfer:
        if self._following is None:
            self._first.finish(drained)
            self._following = self._second()
        return self._following


def _here(pending: Any) -> bool:
    """Whether nobody would wait for what was issued."""
    _, begun, _ = pending
    try:
        return begun is None or bool(begun.here())
    except RuntimeError:  # who waits for it meets it, too, and can say why
        return False


def _numbered(op: Op, item: WorkItem) -> int:
    """The number of a request among those that an item asks of the same ranks.

    Others may have been asked for something else in between. Also one counts that needs
    no messages here: it may elsewhere (a swap with itself).
    """
    ranks = tuple(op.ranks) if isinstance(op, ops.Among) else ()
    item.requests[ranks] += 1
    return item.requests[ranks]


class _Broadcast:
    """Gloo's broadcast, started when it is waited for.

    Gloo matches its collectives by their order alone, and only the order of working is
    the same on every rank, not that of beginning.
    """

    def __init__(self, op: ops.Broadcast, pg: dist.ProcessGroup) -> None:
        self._op, self._pg = op, pg

    def here(self) -> bool:
        return False

    def finish(self, drained: Callable[[], None]) -> None:
        x, root = self._op.tensor, self._op.source
        work = dist.broadcast(x, group_src=root, group=self._pg, async_op=True)
        drained()
        if work is not None:
            work.wait()


# What was begun, and is to be finished.
Begun: TypeAlias = Transfer | _Halves | _Broadcast


def _spread(x: Tensor, source: int, asked: _Asked) -> Transfer:
    """A broadcast in one hop: the source sends to everybody."""
    rank, size = asked.group
    nothing = x.new_empty(0)
    leaving = [x if rank == source else nothing] * size
    arriving = [x if other == source else nothing for other in range(size)]
    return asked.begin(rotation.all_to_all(leaving, arriving, asked.peers))


def alone(op: Op) -> Any:
    """A group of one is its own answer."""
    match op:
        case ops.Among():
            return alone(op.op)
        case ops.AllGather(tensor=x, into=into):
            if into is not None:
                return x if into.data_ptr() == x.data_ptr() else into.copy_(x)
            return x[None] if op.sizes is None else x
        case ops.Swap(tensor=x):
            return x.clone()
        case _:
            return getattr(op, "tensor", None)
