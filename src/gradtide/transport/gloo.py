"""Requests answered by Gloo, on a thread and a group of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.core import ops
from gradtide.core.levels import Members, rows
from gradtide.core.ops import Group, Op
from gradtide.core.transport import CommunicationError, Job, Progress
from gradtide.transport import ring, rotation
from gradtide.transport.comm_queue import CommQueue, WorkItem
from gradtide.transport.hosts import give_up
from gradtide.transport.inquiry import Inquiry, end
from gradtide.transport.ring import Wait
from gradtide.transport.rotation import Rotation

# Waits for what was begun, and calls what it is given when all has been posted.
Finish: TypeAlias = Callable[[Callable[[], None]], None]
Post: TypeAlias = Callable[..., dist.Work]
SMALL, FEW = 1 << 14, 32  # bytes and ranks up to which all is sent to everybody
HOP = 1 << 17  # bytes of a part up to which one hop beats a ring of P - 1
# At one time, per work item, and per request between two ranks: their product is 2^30.
ITEMS, REQUESTS, MESSAGES = 1 << 10, 1 << 6, 1 << 14


class GlooTransport:
    """Torch's Gloo, with rings where Gloo's own collectives waste the wire.

    The queue is a thread: waiting blocks it and not the training thread, so every
    request gets the future that Gloo lacks for most of them.
    """

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self.group = Group(pg.rank(), pg.size())
        self.hosts: Members = rows(pg.size(), 1)
        self.progress = Progress()
        self.payload_bytes = 0
        self._pg = pg
        self._scratches: dict[tuple[tuple[object, int], int], Tensor] = {}
        self._queue = CommQueue("gradtide")
        self.submit = self._queue.submit
        self._inquiry = Inquiry(pg, self._queue, self.progress)
        self._queue.late = self._inquiry.late
        self._at_exit = Finalize(self, end, args=(self._inquiry,), exitpriority=1)

    def issue(self, op: Op) -> Any:
        """Start a request without waiting for anything."""
        if self.group.size == 1:
            return _alone(op), None, ""
        # Also one that needs no messages here: it may elsewhere (a swap with itself).
        item = self._queue.current
        item.requests += 1
        asked = _Asked(op, self.group, self._pg, item)
        # What crosses a link is asked for by one thread, what does not by others, too.
        if not asked.inside:
            self.payload_bytes += ops.crossing(op, self.group) * self._sends(asked)
        name = ops.name_of(op)
        try:
            return *self._start(asked), name
        except RuntimeError as error:
            raise self._blame(name, error) from error

    def _start(self, asked: _Asked) -> tuple[Any, Finish | None]:
        match asked.op:
            case ops.ToHost(tensor=x):
                return x, _later(asked.op, self._pg)
            case _ if asked.group.size == 1:
                return _alone(asked.op), None
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
            case ops.AllReduce(tensor=x) if asked.some:
                return x, self._sum(x, asked)
            case ops.Broadcast(tensor=x, source=source) if asked.some:
                return x, _spread(x, source, asked)
        assert isinstance(asked.op, ops.AllReduce | ops.Broadcast)
        return asked.op.tensor, _later(asked.op, self._pg)

    def wait(self, pending: Any) -> Any:
        answer, work, name = pending
        if work is not None:
            try:
                work(self._queue.begin_next)
            except RuntimeError as error:
                raise self._blame(name, error) from error
        return answer

    def _sends(self, asked: _Asked) -> int:
        op, group = asked.op, asked.group
        if isinstance(op, ops.AllReduce) and self._is_small(op.tensor):
            return (group.size - 1) * op.tensor.nbytes
        return ops.payload_bytes(op, group)

    def carried(self, total: float, largest: float, smallest: float) -> float:
        return ring.carried(total, largest, smallest, self.group.size)

    def gather_objects(self, value: Any) -> list[Any]:
        if self.group.size == 1:
            return [value]
        values: list[Any] = [None] * self.group.size

        def gather() -> None:
            try:
                dist.all_gather_object(values, value, group=self._pg)
            except RuntimeError as error:
                raise self._blame("comparing", error) from error

        self.submit(Job(lambda: None, gather)).join()
        return values

    def close(self) -> None:
        self._queue.close()
        self._inquiry.close("has called sync.remove()")
        self._at_exit.cancel()
        if self._queue.error is None:
            give_up(self._pg)

    def _reduce_scatter(
        self, op: ops.ReduceScatter, asked: _Asked
    ) -> tuple[Tensor, Finish]:
        parts = op.tensor.split_with_sizes(ops.part_sizes(op, asked.group))
        way = rotation if self._in_one_hop(parts, asked.inside) else ring
        scratch = partial(self._scratch, op.tensor)
        begun = way.reduce_scatter(parts, asked.group, asked.messages, scratch)
        return parts[asked.group.rank], begun.finish

    def _all_gather(self, op: ops.AllGather, asked: _Asked) -> tuple[Tensor, Finish]:
        sizes = ops.part_sizes(op, asked.group)
        out = op.into if op.into is not None else op.tensor.new_empty(sum(sizes))
        parts = out.split_with_sizes(sizes)
        own = parts[asked.group.rank]
        if own.data_ptr() != op.tensor.data_ptr():
            own.copy_(op.tensor.flatten())
        way = rotation if self._in_one_hop(parts, asked.inside) else ring
        begun = way.all_gather(parts, asked.group, asked.messages)
        if op.into is None and op.sizes is None:
            out = out.view(asked.group.size, *op.tensor.shape)
        return out, begun.finish

    def _swap(self, op: ops.Swap, asked: _Asked) -> tuple[Tensor, Finish | None]:
        x, peer = op.tensor, op.peer
        if peer == asked.group.rank:
            return x.clone(), None
        out, messages = torch.empty_like(x), asked.messages
        pair = [messages.receive(out, peer), messages.send(x.contiguous(), peer)]
        return out, _through(pair)

    def _all_to_all(self, op: ops.AllToAll, asked: _Asked) -> tuple[Tensor, Finish]:
        rank, x = asked.group.rank, op.tensor.contiguous()
        out = x.new_empty((sum(op.recv), *x.shape[1:]))
        leaving = torch.split(x, list(op.send))
        arriving = torch.split(out, list(op.recv))
        arriving[rank].copy_(leaving[rank])
        return out, Rotation(asked.group, asked.messages, leaving, arriving).finish

    def _sum(self, x: Tensor, asked: _Asked) -> Finish:
        """Sum a large tensor among some ranks, of which Gloo has no group."""
        group, messages = asked.group, asked.messages
        parts = x.view(-1).tensor_split(group.size)
        first = ring.reduce_scatter(parts, group, messages, partial(self._scratch, x))

        def finish(drained: Callable[[], None]) -> None:
            first.finish(lambda: None)
            ring.all_gather(parts, group, messages).finish(drained)

        return finish

    def _in_one_hop(self, parts: Sequence[Tensor], inside: bool) -> bool:
        """Whether waiting P - 1 times would take longer than the bytes do.

        Inside a host it always does: memory has no links that a ring keeps busy.
        """
        if inside:
            return True
        most = max(part.numel() for part in parts) * parts[0].element_size()
        return self.group.size <= FEW and most <= HOP

    def _is_small(self, x: Tensor) -> bool:
        return self.group.size <= FEW and x.nbytes <= SMALL

    def _exchange(self, x: Tensor, asked: _Asked) -> Finish:
        """Sum a small tensor in one hop: everybody sends it to everybody."""
        rank, size = asked.group
        rows = x.new_empty((size, *x.shape))
        rows[rank] = x
        others = [(rank + i) % size for i in range(1, size)]
        messages = asked.messages
        works = [messages.receive(rows[r], r) for r in reversed(others)]
        works += [messages.send(rows[rank], r) for r in others]
        # In the order of ranks, so that the sums are the same everywhere.
        return _through(works, lambda: x.copy_(rows.sum(0)))

    def _scratch(self, like: Tensor, numel: int) -> Tensor:
        """Memory for a ring's arrivals, kept: fresh pages would cost another pass.

        There are two turns of it in each lane, because a work item may begin while the
        one before it is still arriving, and one for each request of an item, as some
        travel together.
        """
        nbytes = numel * like.element_size()
        key = self._queue.turn, self._queue.current.requests
        kept = self._scratches.get(key)
        if kept is None or kept.numel() < nbytes:
            kept = self._scratches[key] = torch.empty(nbytes, dtype=torch.uint8)
        return kept[:nbytes].view(like.dtype)

    def _blame(self, request: str, error: RuntimeError) -> CommunicationError:
        """An error of Gloo's, which names an address at best, as one of ours."""
        if self._queue.error is not None:  # it is known already, and why
            return CommunicationError(str(error))
        peer = getattr(error, "peer", None)
        return CommunicationError(self._inquiry.reporter.explain(request, error, peer))


class _Asked:
    """A request that is being issued, among all ranks or `some`."""

    def __init__(
        self, op: Op, group: Group, pg: dist.ProcessGroup, item: WorkItem
    ) -> None:
        self.some, self.inside = isinstance(op, ops.Among), ops.is_inside(op)
        ranks: Sequence[int] = range(group.size)
        if isinstance(op, ops.Among):
            group, ranks, op = ops.subgroup(op, group), op.ranks, op.op
        self.op, self.group = op, group
        self.messages = _GlooMessages(pg, item, ranks)


class _GlooMessages:
    """Messages of one request between some `ranks`, each with a tag of its own.

    [Note: tags] A message is known by its work item's number, its request's number
    within the item, and its own number within the request. The next item may begin at
    any time while one works, sooner on one rank than on another; requests that travel
    together post their messages when it suits each of them; and Gloo may match messages
    of one tag in another order than theirs (guards: test_many_messages_keep_order,
    test_requests_travel_together).
    """

    def __init__(
        self, pg: dist.ProcessGroup, item: WorkItem, ranks: Sequence[int]
    ) -> None:
        self._ranks = ranks
        self.send = partial(self._post, pg.send, defaultdict(int))
        self.receive = partial(self._post, pg.recv, defaultdict(int))
        request = item.number % ITEMS * REQUESTS + item.requests % REQUESTS
        self._first = request * MESSAGES

    def _post(
        self, post: Post, counts: dict[int, int], tensor: Tensor, peer: int
    ) -> Wait:
        counts[peer] += 1  # of those to it, or from it
        tag = self._first + counts[peer] % MESSAGES
        rank = self._ranks[peer]
        try:
            return partial(_wait, post([tensor], rank, tag), rank)
        except RuntimeError as error:
            raise _LostError(rank, error) from None


def _wait(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _LostError(peer, error) from None


class _LostError(RuntimeError):
    """A message to or from `peer` failed."""

    def __init__(self, peer: int, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.peer = peer


def _later(
    op: ops.AllReduce | ops.Broadcast | ops.ToHost, pg: dist.ProcessGroup
) -> Finish:
    """A collective of Gloo's, started when it is waited for.

    Gloo matches its collectives by their order alone, and only the order of working is
    the same on every rank, not that of beginning.
    """

    def finish(drained: Callable[[], None]) -> None:
        work = None
        match op:
            case ops.AllReduce(tensor=x):
                work = dist.all_reduce(x, group=pg, async_op=True)
            case ops.Broadcast(tensor=x, source=root):
                work = dist.broadcast(x, group_src=root, group=pg, async_op=True)
        drained()
        if work is not None:
            work.wait()

    return finish


def _through(
    posted: Sequence[Wait], after: Callable[[], object] = lambda: None
) -> Finish:
    """Waits for messages, and does something when they are through."""

    def finish(drained: Callable[[], None]) -> None:
        for wait in posted:
            drained()
            wait()
        after()

    return finish


def _spread(x: Tensor, source: int, asked: _Asked) -> Finish:
    """A broadcast among some ranks: the source sends to each of them."""
    rank, size = asked.group
    nothing = x.new_empty(0)
    leaving = [x if rank == source else nothing] * size
    arriving = [x if other == source else nothing for other in range(size)]
    return Rotation(asked.group, asked.messages, leaving, arriving).finish


def _alone(op: Op) -> Any:
    """A group of one is its own answer."""
    match op:
        case ops.Among():
            return _alone(op.op)
        case ops.AllGather(tensor=x, into=into):
            if into is not None:
                return x if into.data_ptr() == x.data_ptr() else into.copy_(x)
            return x[None] if op.sizes is None else x
        case ops.Swap(tensor=x):
            return x.clone()
        case _:
            return getattr(op, "tensor", None)
