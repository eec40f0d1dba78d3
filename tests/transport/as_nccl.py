"""torch.distributed as NCCL has it, for tests without a GPU: it refuses what NCCL does.

Requests are answered over Gloo by plain code, at once. Streams do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.transport import nccl, staged

# uint16, and anything complex, is not among them.
KNOWN = {
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


class Work:
    """What torch returns for a request."""

    def wait(self) -> None: ...
    def is_completed(self) -> bool:
        return True


class AsNccl:
    """Stands for the module `torch.distributed` in `nccl`."""

    P2POp, ReduceOp = dist.P2POp, dist.ReduceOp
    isend, irecv = staticmethod(dist.isend), staticmethod(dist.irecv)
    ProcessGroup, DistError = dist.ProcessGroup, dist.DistError
    get_process_group_ranks = staticmethod(dist.get_process_group_ranks)

    def new_group(self, ranks: list[int], backend: str, **options: Any) -> Any:
        assert backend == "nccl"
        return dist.new_group(ranks, backend="gloo", **options)

    def all_reduce(
        self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any
    ) -> Work:
        check(x)
        x.copy_(mean_or_sum(gathered(x, group), op))
        return Work()

    def reduce_scatter(
        self, out: Tensor, parts: Sequence[Tensor], op: Any, group: Any, **_: Any
    ) -> Work:
        check(out, *parts)
        rows = gathered(torch.cat([part.flatten() for part in parts]), group)
        sizes = [part.numel() for part in parts]
        own = torch.split(mean_or_sum(rows, op), sizes)[group.rank()]
        out.copy_(own.view(out.shape))
        return Work()

    def reduce_scatter_single(
        self, out: Tensor, x: Tensor, op: Any, group: Any, **_: Any
    ) -> Work:
        assert out.numel() * group.size() == x.numel()
        return self.reduce_scatter(out, x.chunk(group.size()), op, group)

    def all_gather(self, out: list[Tensor], x: Tensor, group: Any, **_: Any) -> Work:
        check(x, *out)
        for part, row in zip(out, gathered(x, group), strict=True):
            part.copy_(row.view(part.shape))
        return Work()

    def all_gather_single(self, out: Tensor, x: Tensor, group: Any, **_: Any) -> Work:
        assert x.numel() * group.size() == out.numel()
        rows = out.view(-1).chunk(group.size()) if out.numel() else [out] * group.size()
        return self.all_gather(list(rows), x.view(-1), group)

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        recv: list[int] | None = None,
        send: list[int] | None = None,
        group: Any = None,
        **_: Any,
    ) -> Work:
        check(out, x)
        rank, send = group.rank(), send or [len(x) // group.size()] * group.size()
        rows = gathered((x, send), group)
        out.copy_(torch.cat([torch.split(x, send)[rank] for x, send in rows]))
        return Work()

    def all_to_all(
        self, out: list[Tensor], x: list[Tensor], group: Any, **_: Any
    ) -> Work:
        check(*out, *x)
        for part, row in zip(out, gathered(x, group), strict=True):
            part.copy_(row[group.rank()])
        return Work()

    def broadcast(self, x: Tensor, group_src: int, group: Any, **_: Any) -> Work:
        check(x)
        x.copy_(gathered(x, group)[group_src])
        return Work()

    def batch_isend_irecv(self, pair: list[dist.P2POp]) -> list[Work]:
        check(*(message.tensor for message in pair))
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return [Work()]


def gathered(own: Any, group: Any) -> list[Any]:
    """Everybody's, in rank order."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group)
    return found


def mean_or_sum(rows: list[Tensor], op: Any) -> Tensor:
    total = torch.stack(rows).sum(0, dtype=rows[0].dtype)
    return total / len(rows) if op == dist.ReduceOp.AVG else total


def check(*tensors: Tensor) -> None:
    """Raise ValueError for what NCCL does not take."""
    for x in tensors:
        if not x.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if x.dtype not in KNOWN:
            raise TypeError(f"Unconvertible NCCL type {x.dtype}")


class Stream:
    """One that does nothing, or its event; knows of which devices there are any."""

    devices: ClassVar[set[Any]] = set()

    def __init__(self, device: Any = None) -> None:
        self.devices.add(device)

    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Stream) -> None: ...
    def record(self, stream: Stream) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self) -> Stream:
        return self


@contextmanager
def as_nccl() -> Iterator[None]:
    """Have `nccl`, and `staged` beside it, run without a GPU."""
    there = AsNccl()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "dist", there)
        patch.setattr(nccl, "_reduce_scatter", there.reduce_scatter_single)
        patch.setattr(nccl, "_all_gather", there.all_gather_single)
        for name in ("Stream", "Event"):
            patch.setattr(torch, name, Stream)
        patch.setattr(torch.accelerator, "current_stream", Stream)
        patch.setattr(torch.accelerator, "set_stream", lambda stream: None)
        patch.setattr(staged, "pin", lambda n: torch.empty(n, dtype=torch.uint8))
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: _inside(stream))
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
        yield


@contextmanager
def _inside(stream: Stream) -> Iterator[None]:
    yield
