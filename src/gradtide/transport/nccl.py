"""Requests answered by NCCL on a side stream; the host never waits for the device.

[Note: Launch order] All of NCCL is called on the training thread, so also beside what
the program asks of NCCL itself (SyncBatchNorm, FSDP2) the order of calls is the same on
every rank. On the device, kernels of two communicators may start in another order than
they were launched in. NCCL_LAUNCH_ORDER_IMPLICIT=1 has NCCL (2.26 or newer) keep it,
for programs in which both are under way at once.

[Note: Errors] Where a rank is gone, torch's watchdog ends the whole process, before it
is known which. It reads the environment when a group is made: in groups of ours it only
ends the kernels that wait, and whoever asks for more is told who is gone.

[Note: Words] What is in host memory (who used what, who ran out of batches) goes over
the links of `gloo`. Nobody waits for the other hosts to say it: the rest of a job that
begins with such a request is done by the queue of these links, and the training thread
waits where it reads the answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.core import ops
from gradtide.core.ops import Group, Op
from gradtide.core.torch_internals.distributed import timeout_of
from gradtide.core.transport import CommunicationError, Job, Ticket
from gradtide.core.unproven import warn_unproven
from gradtide.transport.gloo import GlooTransport, alone
from gradtide.transport.hosts import give_up
from gradtide.transport.staged import Pending, refuse_capture

# 2.13 renamed the tensor collectives and warns under the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

Begun: TypeAlias = tuple[Tensor, Any]  # the answer's memory; what is waited for, if any


@contextmanager
def cleaning_up_only() -> Iterator[None]:
    """NCCL's groups that are made inside leave errors to us, see [Note: Errors]."""
    name, clean_up_only = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
    before = os.environ.get(name)
    os.environ.setdefault(name, clean_up_only)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


class NcclTransport:
    """NCCL's own collectives; the queue is a stream, submitted work is queued at once.

    Invariants, on which the lifetimes of buffers rest:
    - the side stream waits for what the training stream had queued at `submit`;
    - the training stream waits for the side stream at `join`, and reads or overwrites
      nothing of a request before;
    - a tensor that was made on the training stream and is used here is recorded on the
      side stream, so that the allocator does not hand its memory out too early.
    """

    def __init__(
        self, pg: dist.ProcessGroup, control: GlooTransport, device: torch.device
    ) -> None:
        warn_unproven(
            "gradtide's transport over NCCL",
            "several GPUs, many ranks, and its speed",
        )
        self.group = Group(pg.rank(), pg.size())
        self.hosts = control.hosts
        self._sent = 0  # bytes over NCCL
        self._pg, self._control, self._device = pg, control, device
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.gather_objects = control.gather_objects
        self.progress, self.delay = control.progress, 0.0
        # On the parameters' device, which need not be the current one.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._worded = False  # what has begun asks for words, see [Note: Words]
        meet(pg, device)

    @property
    def payload_bytes(self) -> int:
        return self._sent + self._control.payload_bytes

    def submit(self, job: Job) -> Ticket:
        refuse_capture()
        try:
            return self._submit(job)
        except RuntimeError as error:
            # If the links' queue has failed, NCCL was aborted, and knows less of why.
            if self._control.error is not None:
                raise self._control.error from error
            if isinstance(error, dist.DistError):
                self._abort()
                raise self._control.blame(job.name, error) from error
            raise

    def _submit(self, job: Job) -> Ticket:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._worded = False
        with torch.cuda.stream(self._stream):
            # All on one stream: what is inside a host takes little time there.
            if job.before is not None:
                job.before()
            job.begin()
            if self._worded:
                return self._control.submit(self._rest(job))
            job.work()
            if job.after is not None:
                job.after()
        return _StreamTicket(self._stream.record_event(), self._device)

    def _rest(self, job: Job) -> Job:
        """What is left of a job that waits for words, for the links' queue."""

        def work() -> None:
            try:
                job.work()
            except CommunicationError:
                self._abort()
                raise

        return replace(job, begin=lambda: None, work=work, before=None)

    def issue(self, op: Op) -> Pending:
        asked, group, pg = ops.message_of(op), self.group, self._pg
        assert not isinstance(asked, ops.Cut | ops.Handover)
        if asked.tensor.device.type != self._device.type:
            self._worded |= not self._control.works_here
            return partial(self._say, op)
        if isinstance(asked, ops.ToHost):
            return asked.tensor.cpu  # the one request for which the host must wait
        if isinstance(op, ops.Among):
            group, pg = ops.subgroup(op, self.group), self._some(tuple(op.ranks))
        if group.size == 1:
            return partial(alone, asked)
        self._sent += ops.payload_bytes(op, self.group)
        asked.tensor.record_stream(self._stream)
        return partial(arrived, *begin(asked, group, pg))

    def _say(self, op: Op) -> Any:
        """Wait for words."""
        control = self._control
        if control.works_here:
            return control.wait(control.issue(op))
        answers: list[Any] = []
        saying = Job(
            lambda: None,
            lambda: answers.append(control.wait(control.issue(op))),
            name=ops.name_of(op),
        )
        control.submit(saying).join()
        return answers[0]

    def carried(self, total: float, largest: float, smallest: float) -> float:
        return total - smallest  # in pieces too small to count

    def wait(self, pending: Pending) -> Any:
        return pending()

    def abandon(self) -> None:
        self._control.abandon()
        self._abort()

    def close(self) -> None:
        self._control.close()
        if self._control.error is not None:
            self._abort()
            return
        for pg in self._groups():
            give_up(pg)

    def _abort(self) -> None:
        """End the kernels that wait for who is gone: nobody else would for minutes."""
        for pg in self._groups():
            pg.abort()

    def _groups(self) -> list[dist.ProcessGroup]:
        return [self._pg, *self._subgroups.values()]

    def _some(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A group of some ranks, made when it is first asked for and then kept."""
        if ranks not in self._subgroups:
            everyone = dist.get_process_group_ranks(self._pg)
            # Else torch sorts them. Older ones always do, and refuse the argument.
            sorts: dict[str, Any] = {"sort_ranks": False}
            order = {} if ranks == tuple(sorted(ranks)) else sorts
            with cleaning_up_only():
                made = dist.new_group(
                    [everyone[rank] for rank in ranks],
                    backend="nccl",
                    timeout=timeout_of(self._pg, self._device),
                    use_local_synchronization=True,
                    group_desc="gradtide nccl",
                    **order,
                )
            assert isinstance(made, dist.ProcessGroup)
            meet(made, self._device)
            self._subgroups[ranks] = made
        return self._subgroups[ranks]


def meet(pg: dist.ProcessGroup, device: torch.device) -> None:
    """Have all ranks of a group connect, which a swap between two cannot."""
    if pg.size() > 1:
        one = torch.ones(1, dtype=torch.float32, device=device)
        dist.all_reduce(one, group=pg)


def begin(asked: ops.Message, group: Group, pg: dist.ProcessGroup) -> Begun:
    """Start a request. NCCL takes what is contiguous and real."""
    match asked:
        case ops.AllReduce(tensor=x):
            return x, dist.all_reduce(_real(x), group=pg, async_op=True)
        case ops.Mean(tensor=x):
            average = dist.ReduceOp.AVG
            return x, dist.all_reduce(_real(x), average, group=pg, async_op=True)
        case ops.ReduceScatter():
            return _scatter(asked, group, pg)
        case ops.AllGather():
            return _gather(asked, group, pg)
        case ops.AllToAll(tensor=x, send=send, recv=recv, used=None):
            out = x.new_empty((sum(recv), *x.shape[1:]))
            return out, dist.all_to_all_single(
                _real(out),
                _real(x.contiguous()),
                list(recv),
                list(send),
                group=pg,
                async_op=True,
            )
        case ops.AllToAll():
            return _used(asked, pg)
        case ops.Broadcast(tensor=x, source=root):
            work = dist.broadcast(_real(x), group_src=root, group=pg, async_op=True)
            return x, work
        case ops.Swap(tensor=x, peer=peer):
            return _swap(x, peer, group, pg)


def arrived(answer: Tensor, work: Any) -> Tensor:
    """An answer that the current stream waits for; the host does not."""
    if work is not None:
        work.wait()
    return answer


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _used(op: ops.AllToAll, pg: dist.ProcessGroup) -> Begun:
    """Send what matters of rows alone: the host waits for how much others send."""
    x, sent = op.tensor, ops.sent_to(op)
    own = torch.tensor(sent, dtype=torch.int64, device=x.device)
    counts = torch.empty_like(own)
    dist.all_to_all_single(counts, own, group=pg)
    out = x.new_empty((sum(op.recv), *x.shape[1:]))
    leaving, arriving = (
        [row.flatten()[:n] for row, n in zip(rows, numels, strict=True)]
        for rows, numels in (
            (torch.split(x, list(op.send)), sent),
            (torch.split(out, list(op.recv)), counts.tolist()),
        )
    )
    return out, dist.all_to_all(arriving, leaving, group=pg, async_op=True)


def _scatter(op: ops.ReduceScatter, group: Group, pg: dist.ProcessGroup) -> Begun:
    sizes = ops.part_sizes(op, group)
    own = torch.split(op.tensor, sizes)[group.rank]
    parts = list(torch.split(_real(op.tensor), sizes))
    part = parts[group.rank]
    way = dist.ReduceOp.AVG if op.mean else dist.ReduceOp.SUM
    if len(set(sizes)) == 1:  # in place: NCCL allows the output to be the own part
        whole = _real(op.tensor)
        return own, _reduce_scatter(part, whole, way, group=pg, async_op=True)
    return own, dist.reduce_scatter(part, parts, way, group=pg, async_op=True)


def _gather(op: ops.AllGather, group: Group, pg: dist.ProcessGroup) -> Begun:
    sizes = ops.part_sizes(op, group)
    own = op.tensor.flatten()
    out = op.into if op.into is not None else own.new_empty(sum(sizes))
    whole, x = _real(out), _real(own)
    if len(set(sizes)) == 1:
        work = _all_gather(whole, x, group=pg, async_op=True)
    else:  # one launch of a broadcast for each
        work = dist.all_gather(
            list(torch.split(whole, sizes)), x, group=pg, async_op=True
        )
    if op.into is None and op.sizes is None:
        out = out.view(group.size, *op.tensor.shape)
    return out, work


def _swap(x: Tensor, peer: int, group: Group, pg: dist.ProcessGroup) -> Begun:
    if peer == group.rank:
        return x.clone(), None
    x = x.contiguous()
    out = torch.empty_like(x)
    pair = [
        dist.P2POp(dist.isend, _real(x), group=pg, group_peer=peer),
        dist.P2POp(dist.irecv, _real(out), group=pg, group_peer=peer),
    ]
    # One grouped launch: its first work stands for both messages.
    return out, dist.batch_isend_irecv(pair)[0]


class _StreamTicket:
    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done, self._device = done, device

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]
