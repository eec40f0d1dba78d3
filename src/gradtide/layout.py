"""Where gradients live: one flat buffer per dtype and device, cut into buckets.

[Note: slots] Every parameter's slot is padded to a multiple of the number of ranks, so
any run of slots divides into equal parts: buckets can be cut anew without moving a
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradtide.bucket import Collective
from gradtide.fusion import Fusion, Trace
from gradtide.gradients import GradientBucket, Slot

Named: TypeAlias = tuple[str, nn.Parameter]
Kind: TypeAlias = tuple[torch.dtype, torch.device]


def lay_out(
    ready: Sequence[Named],
    fusion: Fusion,
    collective: Collective,
    size: int,
    memory: dict[Kind, Tensor] | None = None,
) -> list[GradientBucket]:
    """Buckets for parameters in the order in which their gradients get ready.

    The buckets come in the order in which they get full, named grad0, grad1, ...
    They are slices of the flat buffers in `memory`, where what is not there yet is
    added: the same parameters in the same order have the same places in it, however
    they are cut. Raises ValueError, and has done nothing, for cuts that do not fit.
    """
    kinds: dict[Kind, list[tuple[int, Named]]] = {}
    for position, (name, p) in enumerate(ready):
        kinds.setdefault((p.dtype, p.device), []).append((position, (name, p)))
    memory = {} if memory is None else memory
    buckets = [
        bucket
        for kind, members in kinds.items()
        for bucket in _cut(members, fusion, collective, size, kind, memory)
    ]
    buckets.sort(key=lambda bucket: bucket.slots[-1].position)
    for i, bucket in enumerate(buckets):
        bucket.name = f"grad{i}"
    return buckets


def _cut(
    members: list[tuple[int, Named]],
    fusion: Fusion,
    collective: Collective,
    size: int,
    kind: Kind,
    memory: dict[Kind, Tensor],
) -> list[GradientBucket]:
    """The buckets of one dtype and device, as slices of one flat buffer."""
    dtype, device = kind
    padded = [-(-p.numel() // size) * size for _, (_, p) in members]
    cuts = fusion(Trace([n * dtype.itemsize for n in padded]), lambda _: 0.0)
    _check_cuts(cuts, len(members), fusion)
    if kind not in memory:
        memory[kind] = torch.zeros(sum(padded), dtype=dtype, device=device)
    flat = memory[kind]
    buckets, begin = [], 0
    for cut in cuts:
        offsets = [0]
        for n in padded[cut]:
            offsets.append(offsets[-1] + n)
        slots = [
            Slot(name, p, position, offset)
            for (position, (name, p)), offset in zip(
                members[cut], offsets, strict=False
            )
        ]
        piece = flat[begin : begin + offsets[-1]]
        buckets.append(GradientBucket(slots, piece, collective))
        begin += offsets[-1]
    return buckets


def _check_cuts(cuts: Sequence[slice], length: int, fusion: Fusion) -> None:
    covered = [0, *(cut.stop for cut in cuts)]
    in_turn = all(a < b for a, b in pairwise(covered))
    joined = [cut.start for cut in cuts] == covered[:-1]
    if not in_turn or not joined or covered[-1] != length:
        raise ValueError(
            f"{fusion!r} returned {cuts}: a fusion cuts {length} tensors into "
            "consecutive, non-empty slices that cover all of them"
        )
