"""What of the means a rank owns, or has, while they are held at their cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtide.core.engine import InFlight
from gradtide.core.ops import Group
from gradtide.core.torch_internals import foreach_norm
from gradtide.runtime.layout.buckets import GradientBucket, lives_in

Scale: TypeAlias = Callable[[Tensor, Any], Any]  # in place, by a number
Scales: TypeAlias = list[tuple[Scale, Any]]


def measure(
    buckets: Sequence[GradientBucket],
    flights: Sequence[InFlight | None],
    group: Group,
) -> list[float]:
    """What this rank owns of the means (on the queue, where they are at their cut).

    Of each parameter the square of its norm; of each bucket whether it is not finite;
    and whether the squares are those of the bucket as a whole, in the first of its
    parameters: a part that is no slice of the bucket does not say which entries it has.
    """
    parts, opaque, pieces, waiting = [], [], [], []
    for bucket, flight in zip(buckets, flights, strict=True):
        assert flight is not None
        part, begin = _share(bucket, flight, group)
        parts.append(part)
        opaque.append(begin is None)
        pieces.append(_pieces(bucket, part, begin))
        waiting.append(squares(pieces[-1]))
    # Of all buckets at once: the host waits for a device once.
    told: list[float] = torch.cat([own.to(parts[0].device) for own in waiting]).tolist()
    found, bad = list[float](), []
    for part, own in zip(parts, pieces, strict=True):
        here = told[len(found) : len(found) + len(own)]
        overflows = not math.isfinite(sum(here))
        bad.append(overflows and not bool(part.isfinite().all()))
        if overflows and not bad[-1]:  # a GradScaler's scale may be as large as that
            here = squares(own, torch.float64).tolist()
        found += here
    return [*found, *bad, *opaque]


def scale(bucket: GradientBucket, scales: Sequence[Scales], group: Group) -> None:
    """Scale what this rank has of a held mean, for each slot by its own numbers.

    Others are sent what its owner made of it.
    """
    flight = bucket.flight
    assert flight is not None
    held = flight.mean if flight.part is None else flight.part
    if _alike(scales):
        _apply(held, scales[0])
        return
    begin = 0 if flight.part is None else _share(bucket, flight, group)[1]
    if begin is None:
        raise RuntimeError(
            f"the gradients of {bucket.slots[0].name} and of those that travel with it "
            "are scaled by different numbers: scale all by one under this scheme, or "
            "after sync.gather_gradients(), on every rank"
        )
    for piece, own in zip(_pieces(bucket, held, begin), scales, strict=True):
        _apply(piece, own)


def _alike(scales: Sequence[Scales]) -> bool:
    """Whether all are the same numbers; only of others a device is asked for them."""
    objects = {tuple((function, id(by)) for function, by in own) for own in scales}
    return (
        len(objects) == 1
        or len({tuple((function, float(by)) for function, by in own) for own in scales})
        == 1
    )


def _apply(target: Tensor, scales: Scales) -> None:
    for function, by in scales:
        function(target, by)


def _share(
    bucket: GradientBucket, flight: InFlight, group: Group
) -> tuple[Tensor, int | None]:
    """This rank's part of the mean, and where in the bucket it begins, if it does."""
    part, flat = flight.part, bucket.payload.flat
    if part is None:
        whole: Tensor = flight.mean
        length = flat.numel() // group.size
        begin = group.rank * length
        return whole[begin : begin + length], begin
    if not lives_in(part, flat):
        return part, None
    # By two levels it is not the part of this rank's number.
    return part, (part.data_ptr() - flat.data_ptr()) // flat.element_size()


def _pieces(
    bucket: GradientBucket, part: Tensor, begin: int | None
) -> Sequence[Tensor]:
    """What of a part belongs to each slot of its bucket."""
    if begin is None:
        return [part, *(part[:0] for _ in bucket.slots[1:])]
    ends = [
        (slot.begin - begin, slot.begin - begin + slot.local.numel())
        for slot in bucket.slots
    ]
    return [part[max(first, 0) : max(last, 0)] for first, last in ends]


def squares(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The squares of the 2-norms of tensors of one dtype, in float64.

    They are added up in `dtype`, by default in float32 at the least.
    """
    if dtype is None and tensors[0].dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    norms = foreach_norm(list(tensors), 2, dtype)
    return torch.stack(norms).double().square()
