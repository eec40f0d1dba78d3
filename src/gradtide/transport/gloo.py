"""Requests answered by Gloo, on a thread and a group of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from gradtide.transport import ring
from gradtide.transport.base import CommunicationError, Ticket
from gradtide.transport.fault import Witness
from gradtide.transport.lane import Lane


class GlooTransport:
    """Torch's Gloo, with rings where Gloo's own collectives waste the wire.

    The lane is a thread: waiting blocks it and not the training thread, so every request
    gets the future that Gloo lacks for most of them.
    """

    def __init__(self, pg: dist.ProcessGroup, witness: Witness) -> None:
        self.group = Group(pg.rank(), pg.size())
        self.payload_bytes = 0
        self._pg = pg
        self._witness = witness
        self._messages = _GlooMessages(pg)
        self._lane = Lane("gradtide")

    def submit(self, work: Callable[[], None]) -> Ticket:
        return self._lane.submit(work)

    def issue(self, op: Op) -> Any:
        """Start what Gloo can run in the background; rings run when they are waited for."""
        if self.group.size == 1:
            return _alone(op)
        self.payload_bytes += payload_bytes(op, self.group)
        with self._blamed(op):
            match op:
                case AllReduce(tensor=x):
                    return x, dist.all_reduce(x, group=self._pg, async_op=True)
                case AllToAll():
                    return self._all_to_all(op)
                case Broadcast(tensor=x, source=source):
                    return x, dist.broadcast(
                        x, group_src=source, group=self._pg, async_op=True
                    )
                case _:
                    return op

    def wait(self, pending: Any) -> Any:
        match pending:
            case (answer, None):
                return answer
            case (answer, work):
                with self._blamed(type(work).__name__):
                    work.wait()
                return answer
        with self._blamed(pending):
            match pending:
                case ReduceScatter(tensor=x):
                    parts = x.split(part_sizes(pending, self.group))
                    return ring.reduce_scatter(parts, self.group, self._messages)
                case AllGather():
                    return self._all_gather(pending)
                case Swap(tensor=x, peer=peer):
                    return self._swap(x, peer)
        assert isinstance(pending, ToHost)
        return pending.tensor

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

    def _all_to_all(self, op: AllToAll) -> tuple[Tensor, dist.Work]:
        x = op.tensor.contiguous()
        out = x.new_empty((sum(op.recv), *x.shape[1:]))
        work = dist.all_to_all_single(
            out, x, list(op.recv), list(op.send), group=self._pg, async_op=True
        )
        return out, work

    def _all_gather(self, op: AllGather) -> Tensor:
        sizes = part_sizes(op, self.group)
        out = op.into if op.into is not None else op.tensor.new_empty(sum(sizes))
        parts = out.split(sizes)
        own = parts[self.group.rank]
        if own.data_ptr() != op.tensor.data_ptr():
            own.copy_(op.tensor.flatten())
        ring.all_gather(parts, self.group, self._messages)
        if op.into is None and op.sizes is None:
            return out.view(self.group.size, *op.tensor.shape)
        return out

    def _swap(self, x: Tensor, peer: int) -> Tensor:
        if peer == self.group.rank:
            return x.clone()
        out = torch.empty_like(x)
        works = self._messages.receive(out, peer), self._messages.send(x, peer)
        for work in works:
            work.wait()
        return out

    @contextmanager
    def _blamed(self, what: object) -> Iterator[None]:
        """Turn Gloo's errors, which name an address at best, into ours, naming ranks."""
        try:
            yield
        except RuntimeError as error:
            name = what if isinstance(what, str) else type(what).__name__
            raise CommunicationError(self._witness.explain(name, error)) from error


class _GlooMessages:
    """Messages between group ranks, matched in order for each pair."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def scratch(self, like: Tensor, numel: int) -> Tensor:
        nbytes = numel * like.element_size()
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(like.dtype)

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        return self._pg.send([tensor], peer, 0)

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        return self._pg.recv([tensor], peer, 0)


def _alone(op: Op) -> tuple[Any, None]:
    """A group of one is its own answer."""
    match op:
        case AllGather(tensor=x, into=into):
            if into is not None:
                return (x if into.data_ptr() == x.data_ptr() else into.copy_(x)), None
            return (x[None] if op.sizes is None else x), None
        case Swap(tensor=x):
            return x.clone(), None
        case _:
            return getattr(op, "tensor", None), None
