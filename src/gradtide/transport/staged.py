"""GPU tensors over Gloo: staged through pinned host memory by the queue's threads.

[Note: One stream] All lanes of the queue work on one stream, which is the current one
of their threads from the first to the last item. What is submitted waits on the host
until the device has filled it, so nothing on that stream ever waits for the training
stream, and no lane for what another one does on it.

[Note: Pinned] Host memory is kept, and taken again by whatever is asked next. Who takes
it copies down first, and waits until that has landed: by then all that was copied up
out of the same memory is over, because it was before on the one stream.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor

from gradtide.core import ops
from gradtide.core.ops import Op
from gradtide.core.transport import Job, Ticket
from gradtide.core.unproven import warn_unproven
from gradtide.transport.gloo import GlooTransport
from gradtide.transport.pieces import Piece, answer_to, length, pieces

Pending: TypeAlias = Callable[[], Any]  # waits for an answer, and returns it
NAP = 1e-4  # seconds between two looks at the device; waiting by torch takes a core


class Inside(Protocol):
    """Who answers requests that do not leave this host."""

    def knows(self, op: Op) -> TypeGuard[ops.Among]: ...

    def issue(self, op: ops.Among) -> Pending: ...


class StagedTransport:
    """A GlooTransport for a device's tensors.

    Invariants: the queue's stream begins nothing before the device is done with what
    the training stream had queued at `submit`; the training stream waits for the
    queue's when the ticket is joined; only the queue's threads wait for the device.
    """

    def __init__(
        self,
        host: GlooTransport,
        device: torch.device,
        inside: Inside | None = None,
    ) -> None:
        warn_unproven(
            "gradtide's transport of GPU tensors over Gloo, through host memory,",
            "several GPUs, NCCL inside hosts beside it, and its speed",
        )
        self.group, self.hosts = host.group, host.hosts
        self._host, self._device, self._inside = host, device, inside
        self._stream = torch.Stream(device)
        self._here = threading.local()  # whether a thread's stream is set
        self._pinned = Pinned()
        self.gather_objects, self.close = host.gather_objects, host.close
        self.abandon = host.abandon
        self.carried, self.progress = host.carried, host.progress
        self.delay = host.delay

    @property
    def payload_bytes(self) -> int:
        return self._host.payload_bytes

    def submit(self, job: Job) -> Ticket:
        refuse_capture()
        filled = torch.accelerator.current_stream(self._device).record_event()
        done = torch.Event(self._device)

        def streamed(
            part: Callable[[], None], last: bool = False
        ) -> Callable[[], None]:
            def run() -> None:
                self._await(filled)
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
            filled=filled.query,
            advance=lambda here: None,  # what waits for the device is not asked here
        )
        return _StreamTicket(self._host.submit(staged), done, self._device)

    def _await(self, filled: torch.Event) -> None:
        """Wait until the device has come to an event; see [Note: One stream]."""
        if not getattr(self._here, "set", False):
            # For good: a context would keep the stream before in the stream itself,
            # where other lanes have theirs.
            torch.accelerator.set_stream(self._stream)
            self._here.set = True
        while not filled.query():
            time.sleep(NAP)

    def issue(self, op: Op) -> Pending:
        asked = ops.message_of(op)
        assert not isinstance(asked, ops.Cut | ops.Handover)
        size = len(op.ranks) if isinstance(op, ops.Among) else self.group.size
        here = asked.tensor.device.type == self._device.type
        if here and isinstance(asked, ops.ToHost):
            return asked.tensor.cpu
        if here and self._inside is not None and self._inside.knows(op):
            return self._inside.issue(op)
        if here and size > 1:
            return _Staging(op, self._host, self._stream, self._pinned).finish
        pending = self._host.issue(op)
        return lambda: self._host.wait(pending)

    def wait(self, pending: Pending) -> Any:
        return pending()


class Pinned:
    """Host memory that a device copies from and to by itself, see [Note: Pinned].

    There are as many pieces of it as requests were under way at once.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._turn = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """The shortest that is long enough, or a new one in place of the longest."""
        with self._turn:
            lengths = [len(memory) for memory in self._free]
            at = min(bisect_left(lengths, nbytes), len(lengths) - 1)
            memory = self._free.pop(at) if lengths else None
        if memory is None or len(memory) < nbytes:
            return pin(nbytes)
        return memory

    def give_back(self, memory: Tensor) -> None:
        with self._turn:
            self._free.append(memory)
            self._free.sort(key=len)


class _Staging:
    """A request on its way through host memory, one piece after the other."""

    def __init__(
        self,
        op: Op,
        host: GlooTransport,
        stream: torch.Stream,
        pinned: Pinned,
    ) -> None:
        """Copy down all of it, and ask for the first piece."""
        self._op, self._host, self._pinned = op, host, pinned
        asked, group = ops.message_of(op), host.group
        assert not isinstance(asked, ops.Cut | ops.Handover | ops.ToHost)
        if isinstance(op, ops.Among):
            group = ops.subgroup(op, group)
        self._answer = answer_to(asked, group)
        size, dtype = asked.tensor.element_size(), asked.tensor.dtype
        nbytes = size * length(asked, self._answer)
        self._memory = pinned.take(nbytes)
        here = self._memory[:nbytes].view(dtype)
        self._coming: deque[tuple[Piece, torch.Event]] = deque()
        self._asked: deque[tuple[Piece, Any]] = deque()
        for piece in pieces(asked, group, self._answer, here):
            copy(piece.into, piece.down)
            self._coming.append((piece, stream.record_event()))
        self._ask()

    def _ask(self) -> None:
        """Ask for the next piece, if there is one, once it is here."""
        if not self._coming:
            return
        piece, landed = self._coming.popleft()
        landed.synchronize()
        op: Op = piece.op
        if isinstance(self._op, ops.Among):
            op = replace(self._op, op=piece.op)
        self._asked.append((piece, self._host.issue(op, piece.room)))

    def finish(self) -> Tensor:
        """Wait for each piece, when the one behind it is on its way, too."""
        while self._asked:
            piece, pending = self._asked.popleft()
            self._ask()
            copy(piece.up, self._host.wait(pending).view(piece.up.shape))
        self._pinned.give_back(self._memory)
        return self._answer


def copy(target: Tensor, source: Tensor) -> None:
    """Between a device and pinned memory: the host goes on."""
    target.copy_(source, non_blocking=True)


def pin(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is recorded on the current stream.

    What is recorded exchanges nothing when it is replayed. The graphs of torch.compile
    (`mode="reduce-overhead"`) are not meant: they hold what is between two hooks, and
    hooks run outside of them.
    """
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialized and torch.cuda.is_current_stream_capturing():
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

    def done(self) -> bool:
        return self._inner.done() and self._done.query()
