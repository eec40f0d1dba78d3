"""Requests answered by NCCL on a side stream; the host never waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.core import ops
from gradtide.core.ops import Group, Op
from gradtide.core.transport import Job, Ticket
from gradtide.core.unproven import warn_unproven
from gradtide.transport.gloo import GlooTransport
from gradtide.transport.hosts import give_up
from gradtide.transport.staged import refuse_capture

# 2.13 renamed the tensor collectives and warns under the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class NcclTransport:
    """NCCL's own collectives; the queue is a stream, submitted work is queued at once.

    Invariants, on which the lifetimes of buffers rest:
    - the side stream waits for what the training stream had queued at `submit`;
    - the training stream waits for the side stream at `join`, and reads or overwrites
      nothing of a request before;
    - a tensor that was made on the training stream and is used here is recorded on the
      side stream, so that the allocator does not hand its memory out too early.
    """

    def __init__(self, pg: dist.ProcessGroup, control: GlooTransport) -> None:
        warn_unproven(
            "gradtide's transport over NCCL",
            "the order of its streams, the lifetimes of its buffers, what happens when "
            "a rank dies, and its speed",
        )
        self.group = Group(pg.rank(), pg.size())
        self.hosts = control.hosts
        self._sent = 0  # bytes over NCCL
        self._pg, self._control = pg, control
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.gather_objects = control.gather_objects
        self.progress = control.progress
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @property
    def payload_bytes(self) -> int:
        return self._sent + self._control.payload_bytes

    def submit(self, job: Job) -> Ticket:
        refuse_capture()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # All on one stream: what is inside a host takes little time there.
            for part in (job.before, job.begin, job.work, job.after):
                if part is not None:
                    part()
        return _StreamTicket(self._stream.record_event())

    def issue(self, op: Op) -> Any:
        asked, group, pg = ops.message_of(op), self.group, self._pg
        assert not isinstance(asked, ops.Cut | ops.Handover)
        if isinstance(op, ops.Among):
            group, pg = ops.subgroup(op, self.group), self._some(tuple(op.ranks))
        if not asked.tensor.is_cuda:
            return self._control.wait(self._control.issue(op)), None
        self._sent += ops.payload_bytes(op, self.group)
        asked.tensor.record_stream(self._stream)
        match asked:
            case ops.AllReduce(tensor=x):
                return x, dist.all_reduce(x, group=pg, async_op=True)
            case ops.Mean(tensor=x):
                average = dist.ReduceOp.AVG
                return x, dist.all_reduce(x, average, group=pg, async_op=True)
            case ops.ReduceScatter():
                return _scatter(asked, group, pg)
            case ops.AllGather():
                return _gather(asked, group, pg)
            case ops.AllToAll(tensor=x, send=send, recv=recv):
                out = x.new_empty((sum(recv), *x.shape[1:]))
                return out, dist.all_to_all_single(
                    out, x, list(recv), list(send), group=pg, async_op=True
                )
            case ops.Broadcast(tensor=x, source=root):
                return x, dist.broadcast(x, group_src=root, group=pg, async_op=True)
            case ops.Swap(tensor=x, peer=peer):
                return _swap(x, peer, group, pg)
        assert isinstance(asked, ops.ToHost)
        return asked.tensor.cpu(), None  # the one request for which the host must wait

    def carried(self, total: float, largest: float, smallest: float) -> float:
        return total - smallest  # in pieces too small to count

    def wait(self, pending: Any) -> Any:
        answer, work = pending
        if work is not None:
            work.wait()  # the side stream waits, the host does not
        return answer

    def close(self) -> None:
        self._control.close()
        for pg in (self._pg, *self._subgroups.values()):
            give_up(pg)

    def _some(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A group of some ranks, made when it is first asked for and then kept."""
        if ranks not in self._subgroups:
            everyone = dist.get_process_group_ranks(self._pg)
            made = dist.new_group(
                [everyone[rank] for rank in ranks],
                backend="nccl",
                use_local_synchronization=True,
                group_desc="gradtide nccl",
            )
            assert isinstance(made, dist.ProcessGroup)
            self._subgroups[ranks] = made
        return self._subgroups[ranks]


def _scatter(
    op: ops.ReduceScatter, group: Group, pg: dist.ProcessGroup
) -> tuple[Tensor, dist.Work]:
    sizes = ops.part_sizes(op, group)
    parts = list(torch.split(op.tensor, sizes))
    own = parts[group.rank]
    way = dist.ReduceOp.AVG if op.mean else dist.ReduceOp.SUM
    if len(set(sizes)) == 1:  # in place: NCCL allows the output to be the own part
        return own, _reduce_scatter(own, op.tensor, way, group=pg, async_op=True)
    return own, dist.reduce_scatter(own, parts, way, group=pg, async_op=True)


def _gather(
    op: ops.AllGather, group: Group, pg: dist.ProcessGroup
) -> tuple[Tensor, dist.Work]:
    sizes = ops.part_sizes(op, group)
    x = op.tensor.flatten()
    out = op.into if op.into is not None else x.new_empty(sum(sizes))
    if len(set(sizes)) == 1:
        work = _all_gather(out, x, group=pg, async_op=True)
    else:
        parts = list(torch.split(out, sizes))
        work = dist.all_gather(parts, x, group=pg, async_op=True)
    if op.into is None and op.sizes is None:
        out = out.view(group.size, *op.tensor.shape)
    return out, work


def _swap(
    x: Tensor, peer: int, group: Group, pg: dist.ProcessGroup
) -> tuple[Tensor, dist.Work | None]:
    if peer == group.rank:
        return x.clone(), None
    out = torch.empty_like(x)
    pair = [
        dist.P2POp(dist.isend, x, group=pg, group_peer=peer),
        dist.P2POp(dist.irecv, out, group=pg, group_peer=peer),
    ]
    # One grouped launch: its first work stands for both messages.
    return out, dist.batch_isend_irecv(pair)[0]


class _StreamTicket:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def join(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)
