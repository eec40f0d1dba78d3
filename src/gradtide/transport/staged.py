"""GPU tensors over Gloo: staged through pinned host memory by the queue's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtide.core.ops import (
    AllGather,
    AllReduce,
    Among,
    Broadcast,
    Group,
    Mean,
    Op,
    ReduceScatter,
    ToHost,
    message_of,
    part_sizes,
    subgroup,
)
from gradtide.core.transport import Job, Ticket
from gradtide.core.unproven import warn_unproven
from gradtide.transport.gloo import GlooTransport

Stage: TypeAlias = Callable[[], None]


class StagedTransport:
    """A GlooTransport for a device's tensors.

    The queue has a stream of its own. Invariants: the queue's stream waits for what the
    training stream had queued when the work was submitted; the training stream waits
    for the queue's when the ticket is joined; only the queue's thread waits for the
    device.
    """

    def __init__(self, host: GlooTransport, device: torch.device) -> None:
        warn_unproven(
            "gradtide's transport of GPU tensors over Gloo, through host memory,",
            "the order of its streams and copies, and its speed",
        )
        self.group, self.hosts = host.group, host.hosts
        self._host, self._device = host, device
        self._stream = torch.Stream(device)
        self.gather_objects, self.close = host.gather_objects, host.close
        self.carried, self.progress = host.carried, host.progress

    @property
    def payload_bytes(self) -> int:
        return self._host.payload_bytes

    def submit(self, job: Job) -> Ticket:
        refuse_capture()
        filled = torch.accelerator.current_stream(self._device).record_event()
        done = torch.Event(self._device)

        def streamed(part: Callable[[], None], last: bool = False) -> Stage:
            def run() -> None:
                with self._stream:
                    self._stream.wait_event(filled)
                    part()
                    if last:
                        done.record(self._stream)

            return run

        staged = replace(
            job,
            begin=streamed(job.begin),
            work=streamed(job.work, last=job.after is None),
            before=job.before and streamed(job.before),
            after=job.after and streamed(job.after, last=True),
        )
        ticket = self._host.submit(staged)
        return _StreamTicket(ticket, done, self._device)

    def issue(self, op: Op) -> Any:
        if isinstance(op, ToHost):
            return op, None
        asked = message_of(op)
        staged: dict[str, Any] = {
            f.name: self._to_host(value)
            for f in fields(asked)
            if isinstance(value := getattr(asked, f.name), Tensor)
        }
        self._stream.synchronize()  # the copies must have landed before Gloo reads them
        there: Any = replace(asked, **staged)
        if isinstance(op, Among):
            there = replace(op, op=there)
        return op, self._host.issue(there)

    def wait(self, pending: Any) -> Any:
        op, inner = pending
        if isinstance(op, ToHost):
            self._stream.synchronize()
            return op.tensor.cpu()
        answer: Tensor = self._host.wait(inner)
        target = in_place(op, self.group)
        if target is None:
            return answer.to(self._device, non_blocking=True)
        return target.copy_(answer, non_blocking=True)

    def _to_host(self, x: Tensor) -> Tensor:
        pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
        return pinned.copy_(x, non_blocking=True)


def in_place(op: Op, group: Group) -> Tensor | None:
    """The memory of who asks that holds the answer, if one may rely on that."""
    asked = message_of(op)
    group = subgroup(op, group) if isinstance(op, Among) else group
    match asked:
        case ReduceScatter(tensor=x):
            return x.split_with_sizes(part_sizes(asked, group))[group.rank]
        case AllReduce(tensor=x) | Mean(tensor=x) | Broadcast(tensor=x):
            return x
        case AllGather(into=into):
            return into
    return None


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is recorded on the current stream.

    What is recorded exchanges nothing when it is replayed. The graphs of torch.compile
    (`mode="reduce-overhead"`) are not meant: they hold what is between two hooks, and
    hooks run outside of them.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a backward pass, or a step, is recorded into a CUDA graph, whose replays "
            "would exchange nothing: leave backward and optimizer.step() out of "
            "torch.cuda.graph(), or use torch.compile(mode='reduce-overhead')"
        )


class _StreamTicket:
    def __init__(self, inner: Ticket, done: torch.Event, device: torch.device) -> None:
        self._inner, self._done, self._device = inner, done, device

    def join(self) -> None:
        self._inner.join()
        torch.accelerator.current_stream(self._device).wait_event(self._done)
