"""Buckets by their size alone, or as they are told: nothing has to be known of time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from gradtide.fusion.base import Cost, Trace


@dataclass(frozen=True)
class BySize:
    """Buckets of at most `megabytes` MB (10^6 bytes), or a larger tensor.

    What is less than a tenth of that does not travel alone, but with the tensor behind
    it: a start-up costs more than waiting for that one. Smaller models are cut into
    about `pieces`, and travel whole up to twice `ends`. The first and the last bucket
    are kept to `ends` MB: the first leaves early, and under DEAR it is what the next
    forward waits for last; the last leaves when backward has ended and is what the next
    forward waits for first. Nothing is left to hide them.
    """

    megabytes: float = 10.0  # larger => fewer start-ups, less overlap
    ends: float = 1.0
    pieces: int = 6  # more => more overlap in small models, more start-ups

    def __post_init__(self) -> None:
        if not (self.megabytes > 0 and self.ends > 0 and self.pieces > 0):
            raise ValueError(
                f"{self}: sizes and counts of buckets are positive numbers"
            )

    def __call__(self, trace: Trace, cost: Cost | None = None) -> list[slice]:
        nbytes = trace.nbytes
        if sum(nbytes) <= 2e6 * self.ends:
            return [slice(0, len(nbytes))] if nbytes else []
        middle = min(1e6 * self.megabytes, sum(nbytes) / self.pieces)
        end = min(1e6 * self.ends, middle)
        last = len(nbytes) - max(1, sum(n <= end for n in accumulate(reversed(nbytes))))
        slices: list[slice] = []
        begin, filled = 0, 0
        for i, n in enumerate(nbytes):
            limit, least = (middle, middle / 10) if slices else (end, 0)
            full = filled > least and filled + n > limit
            if full or (filled and i == last):
                slices.append(slice(begin, i))
                begin, filled = i, 0
            filled += n
        return [*slices, slice(begin, len(nbytes))]


@dataclass(frozen=True)
class PerTensor:
    """Every tensor in a bucket of its own: the un-fused yardstick."""

    def __call__(self, trace: Trace, cost: Cost | None = None) -> list[slice]:
        return [slice(i, i + 1) for i in range(len(trace.nbytes))]


@dataclass(frozen=True)
class Cuts:
    """Buckets that somebody else has worked out: bucket i ends before tensor `ends[i]`.

    Tensors are counted in the order in which gradients get ready; the last of `ends` is
    their number. For models with parameters of one dtype on one device.
    """

    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ends or any(b <= a for a, b in pairwise((0, *self.ends))):
            raise ValueError(
                "Cuts(ends=...): the ends of buckets are ascending counts from 1"
            )

    def __call__(self, trace: Trace, cost: Cost | None = None) -> list[slice]:
        if len(trace.nbytes) != self.ends[-1]:
            raise ValueError(
                f"{self} is for {self.ends[-1]} tensors of one dtype and device, and "
                f"here are {len(trace.nbytes)}: plan for this model"
            )
        return [slice(begin, end) for begin, end in pairwise((0, *self.ends))]
