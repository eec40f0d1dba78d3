"""Requests answered by Gloo, on a thread and a group of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Group,
    Op,
    ReduceScatter,
    Swap,
    ToHost,
    part_sizes,
    payload_bytes,
)
from gradtide.transport import ring, rotation
from gradtide.transport.base import CommunicationError, Ticket
from gradtide.transport.fault import Witness
from gradtide.transport.lane import Errand, Lane
from gradtide.transport.ring import Ring
from gradtide.transport.rotation import Rotation

SMALL, FEW = 1 << 14, 32  # bytes and ranks up to which all is sent to everybody
HOP = 1 << 17  # bytes of a part up to which one hop beats a ring of P - 1
# At one time, per errand, and per request between two ranks: their product is 2^30.
ERRANDS, REQUESTS, MESSAGES = 1 << 10, 1 << 6, 1 << 14


class GlooTransport:
    """Torch's Gloo, with rings where Gloo's own collectives waste the wire.

    The lane is a thread: waiting blocks it and not the training thread, so every
    request gets the future that Gloo lacks for most of them.
    """

    def __init__(self, pg: dist.ProcessGroup, witness: Witness) -> None:
        self.group = Group(pg.rank(), pg.size())
        self.payload_bytes = 0
        self._pg = pg
        self._witness = witness
        self._scratches: dict[tuple[int, int], Tensor] = {}
        self._lane = Lane("gradtide")

    def submit(self, begin: Callable[[], None], work: Callable[[], None]) -> Ticket:
        return self._lane.submit(begin, work)

    def issue(self, op: Op) -> Any:
        """Start a request without waiting for anything."""
        if self.group.size == 1:
            return _alone(op), None
        self.payload_bytes += self.sends(op)
        # Also one that needs no messages here: it may elsewhere (a swap with itself).
        self._lane.current.requests += 1
        with self._blamed(op):
            match op:
                case ReduceScatter():
                    return self._reduce_scatter(op)
                case AllGather():
                    return self._all_gather(op)
                case Swap(tensor=x, peer=peer):
                    return self._swap(x, peer)
                case AllToAll():
                    return self._all_to_all(op)
                case AllReduce(tensor=x) if self._is_small(x):
                    return x, self._exchange(x)
        assert isinstance(op, AllReduce | Broadcast | ToHost)
        return op.tensor, _Later(op, self._pg)

    def wait(self, pending: Any) -> Any:
        answer, work = pending
        with self._blamed(work):
            if work is not None:
                work.finish(self._lane.begin_next)
        return answer

    def sends(self, op: Op) -> int:
        if isinstance(op, AllReduce) and self._is_small(op.tensor):
            return (self.group.size - 1) * op.tensor.numel() * op.tensor.element_size()
        return payload_bytes(op, self.group)

    def carried(self, total: float, largest: float, smallest: float) -> float:
        return ring.carried(total, largest, smallest, self.group.size)

    def gather_objects(self, value: Any) -> list[Any]:
        if self.group.size == 1:
            return [value]
        values: list[Any] = [None] * self.group.size
        with self._blamed("set-up"):
            dist.all_gather_object(values, value, group=self._pg)
        return values

    def close(self) -> None:
        self._lane.close()
        if self._lane.error is None:
            dist.destroy_process_group(self._pg)

    def _reduce_scatter(self, op: ReduceScatter) -> tuple[Tensor, Ring | Rotation]:
        parts = torch.split(op.tensor, part_sizes(op, self.group))
        if self._in_one_hop(parts):
            own = parts[self.group.rank]
            scratch = self._scratch(own, own.numel() * self.group.size)
            return own, rotation.reduce_scatter(
                parts, self.group, self._messages(), scratch
            )
        scratch = self._scratch(op.tensor, ring.scratch_numel(parts))
        begun = ring.reduce_scatter(parts, self.group, self._messages(), scratch)
        return parts[self.group.rank], begun

    def _all_gather(self, op: AllGather) -> tuple[Tensor, Ring | Rotation]:
        sizes = part_sizes(op, self.group)
        out = op.into if op.into is not None else op.tensor.new_empty(sum(sizes))
        parts = torch.split(out, sizes)
        own = parts[self.group.rank]
        if own.data_ptr() != op.tensor.data_ptr():
            own.copy_(op.tensor.flatten())
        way = rotation if self._in_one_hop(parts) else ring
        begun = way.all_gather(parts, self.group, self._messages())
        if op.into is None and op.sizes is None:
            out = out.view(self.group.size, *op.tensor.shape)
        return out, begun

    def _swap(self, x: Tensor, peer: int) -> tuple[Tensor, Any]:
        if peer == self.group.rank:
            return x.clone(), None
        out = torch.empty_like(x)
        messages = self._messages()
        return out, _Several(
            [messages.receive(out, peer), messages.send(x.contiguous(), peer)]
        )

    def _all_to_all(self, op: AllToAll) -> tuple[Tensor, Rotation]:
        rank, x = self.group.rank, op.tensor.contiguous()
        out = x.new_empty((sum(op.recv), *x.shape[1:]))
        leaving = torch.split(x, list(op.send))
        arriving = torch.split(out, list(op.recv))
        arriving[rank].copy_(leaving[rank])
        return out, Rotation(self.group, self._messages(), leaving, arriving)

    def _messages(self) -> _GlooMessages:
        """For the request that is being issued."""
        return _GlooMessages(self._pg, self._lane.current)

    def _in_one_hop(self, parts: Sequence[Tensor]) -> bool:
        """Whether waiting P - 1 times would take longer than the bytes do."""
        most = max(part.numel() for part in parts) * parts[0].element_size()
        return self.group.size <= FEW and most <= HOP

    def _is_small(self, x: Tensor) -> bool:
        return self.group.size <= FEW and x.numel() * x.element_size() <= SMALL

    def _exchange(self, x: Tensor) -> _Several:
        """Sum a small tensor in one hop: everybody sends it to everybody."""
        rank, size = self.group
        rows = x.new_empty((size, *x.shape))
        rows[rank] = x
        others = [(rank + i) % size for i in range(1, size)]
        messages = self._messages()
        works = [messages.receive(rows[r], r) for r in reversed(others)]
        works += [messages.send(rows[rank], r) for r in others]
        # In the order of ranks, so that the sums are the same everywhere.
        return _Several(works, lambda: x.copy_(rows.sum(0)))

    def _scratch(self, like: Tensor, numel: int) -> Tensor:
        """Memory for a ring's arrivals, kept: fresh pages would cost another pass.

        In two turns: an errand may begin while the one before it is still arriving. And
        for each request of an errand, as some travel together.
        """
        errand, nbytes = self._lane.current, numel * like.element_size()
        key = errand.number % 2, errand.requests
        kept = self._scratches.get(key)
        if kept is None or kept.numel() < nbytes:
            kept = self._scratches[key] = torch.empty(nbytes, dtype=torch.uint8)
        return kept[:nbytes].view(like.dtype)

    @contextmanager
    def _blamed(self, what: object) -> Iterator[None]:
        """Turn Gloo's errors, which name an address at best, into ours."""
        try:
            yield
        except RuntimeError as error:
            name = what if isinstance(what, str) else type(what).__name__
            text = self._witness.explain(name, error, getattr(error, "peer", None))
            raise CommunicationError(text) from error


class _GlooMessages:
    """Messages of one request between group ranks, each with a tag of its own.

    [Note: tags] A message is known by its errand's number, its request's number within
    the errand, and its own number within the request. The next errand may begin at any
    time while one works, sooner on one rank than on another; requests that travel
    together post their messages when it suits each of them; and Gloo may match messages
    of one tag in another order than theirs (guards: test_many_messages_keep_order,
    test_requests_travel_together).
    """

    def __init__(self, pg: dist.ProcessGroup, errand: Errand) -> None:
        self._pg = pg
        self._count: Counter[tuple[str, int]] = Counter()
        request = errand.number % ERRANDS * REQUESTS + errand.requests % REQUESTS
        self._first = request * MESSAGES

    def send(self, tensor: Tensor, peer: int) -> _Message:
        tag = self._tag("to", peer)
        return _Message(peer, lambda: self._pg.send([tensor], peer, tag))

    def receive(self, tensor: Tensor, peer: int) -> _Message:
        tag = self._tag("from", peer)
        return _Message(peer, lambda: self._pg.recv([tensor], peer, tag))

    def _tag(self, kind: str, peer: int) -> int:
        self._count[kind, peer] += 1
        return self._first + self._count[kind, peer] % MESSAGES


class _LostError(RuntimeError):
    """A message to or from `peer` failed."""

    def __init__(self, peer: int, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.peer = peer


class _Message:
    """A message that was posted; its errors know the peer."""

    def __init__(self, peer: int, post: Callable[[], dist.Work]) -> None:
        self._peer = peer
        try:
            self._work = post()
        except RuntimeError as error:
            raise _LostError(peer, error) from None

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _LostError(self._peer, error) from None


class _Later:
    """A collective of Gloo's, started when it is waited for.

    Gloo matches its collectives by their order alone, and only the order of working is
    the same on every rank, not that of beginning.
    """

    def __init__(
        self, op: AllReduce | Broadcast | ToHost, pg: dist.ProcessGroup
    ) -> None:
        self._op, self._pg = op, pg

    def finish(self, drained: Callable[[], None]) -> None:
        pg, work = self._pg, None
        match self._op:
            case AllReduce(tensor=x):
                work = dist.all_reduce(x, group=pg, async_op=True)
            case Broadcast(tensor=x, source=root):
                work = dist.broadcast(x, group_src=root, group=pg, async_op=True)
        drained()
        if work is not None:
            work.wait()


class _Several:
    """Messages to wait for, and what to do when they are through."""

    def __init__(
        self, works: Sequence[_Message], after: Callable[[], object] | None = None
    ) -> None:
        self._works, self._after = works, after

    def finish(self, drained: Callable[[], None]) -> None:
        for work in self._works:
            drained()
            work.wait()
        if self._after is not None:
            self._after()


def _alone(op: Op) -> Any:
    """A group of one is its own answer."""
    match op:
        case AllGather(tensor=x, into=into):
            if into is not None:
                return x if into.data_ptr() == x.data_ptr() else into.copy_(x)
            return x[None] if op.sizes is None else x
        case Swap(tensor=x):
            return x.clone()
        case _:
            return getattr(op, "tensor", None)
