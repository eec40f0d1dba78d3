"""Indices of a bucket on the wire, with a report on every segment they lie in.

[Note: room] A message has room for as many indices as its sender was to find. The plan
is the same on all ranks, so they know the length of every message, and nothing has to
be told first. Indices are those of the sender's segments as if these lay one after the
other, see `wire.indices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradtide.collectives._entries import ALIGN, Steps
from gradtide.collectives.partitions import Plan, Report
from gradtide.core.devices import on_device
from gradtide.core.ops import AllGather, Group, ToHost
from gradtide.selectors.indices import index_dtype
from gradtide.wire.indices import Indices

HEAD = 12  # bytes of a Report


class _Bin(NamedTuple):
    """What all ranks know of a message before it arrives."""

    segments: Sequence[int]
    begins: Sequence[int]  # of the segments, one after the other; and their end
    shifts: Sequence[int]  # from there to the segments' places in the bucket
    indices: Indices
    sizes: list[int]  # bytes of reports, of indices, and up to the next message


def gather_indices(
    found: Sequence[Tensor],
    numbers: Sequence[Tensor],
    plan: Plan,
    bins: Sequence[Sequence[int]],
    device: torch.device,
    group: Group,
) -> Steps:
    """What all ranks found: indices in the bucket (1-D, int32), one tensor a rank,
    and the reports on all segments in the order of the plan.

    `bins[r]` are rank r's segments. `found` are this rank's, relative to the segment;
    not more than the plan asks for, and on `device`. So are `numbers`, which are the
    threshold and the norm of each segment (float32).
    """
    kinds = [_bin(segments, plan) for segments in bins]
    sizes = [sum(kind.sizes) for kind in kinds]
    message = _pack(found, numbers, kinds[group.rank], device)
    arrived = torch.split((yield AllGather(message, sizes)), sizes)
    heads = [part[: kind.sizes[0]] for part, kind in zip(arrived, kinds, strict=True)]
    table = (yield ToHost(torch.cat(heads))).view(torch.int32).view(-1, 3)
    counts = table[:, 0].tolist()
    pairs = table[:, 1:].contiguous().view(torch.float32).tolist()
    order = [s for segments in bins for s in segments]
    heard = [Report(n, *both) for n, both in zip(counts, pairs, strict=True)]
    told = dict(zip(order, heard, strict=True))
    rows = [
        _unpack(part, kind, [told[s].found for s in kind.segments], plan.edges[-1])
        for part, kind in zip(arrived, kinds, strict=True)
    ]
    return rows, [told[s] for s in range(len(plan.quotas))]


def _bin(segments: Sequence[int], plan: Plan) -> _Bin:
    lengths = [plan.edges[s + 1] - plan.edges[s] for s in segments]
    begins = list(accumulate(lengths, initial=0))
    shifts = [plan.edges[s] - b for s, b in zip(segments, begins, strict=False)]
    indices = Indices(sum(plan.quotas[s] for s in segments), begins[-1])
    head, own = HEAD * len(segments), indices.nbytes
    padding = -(head + own) % ALIGN
    return _Bin(segments, begins, shifts, indices, [head, own, padding])


def _pack(
    found: Sequence[Tensor], numbers: Sequence[Tensor], kind: _Bin, device: torch.device
) -> Tensor:
    message = torch.zeros(sum(kind.sizes), dtype=torch.uint8, device=device)
    if not found:
        return message
    head, own, _ = torch.split(message, kind.sizes)
    counts = on_device([len(w) for w in found], torch.int32, device)
    table = torch.cat([counts[:, None], torch.stack([*numbers]).view(torch.int32)], 1)
    head.copy_(table.view(torch.uint8).flatten())
    where = torch.cat([w + begin for w, begin in zip(found, kind.begins, strict=False)])
    kind.indices.encode(where, own)
    return message


def _unpack(message: Tensor, kind: _Bin, counts: Sequence[int], n: int) -> Tensor:
    own = torch.split(message, kind.sizes)[1]
    where = kind.indices.decode(own, sum(counts), index_dtype(n))
    if len(counts) == 1:
        return where.add_(kind.shifts[0])
    shifts = on_device(kind.shifts, where.dtype, where.device)
    numbers = on_device(counts, torch.int64, where.device)
    return where.add_(shifts.repeat_interleave(numbers, output_size=len(where)))
