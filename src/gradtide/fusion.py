"""Which gradients travel together: pure functions from tensor sizes to slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol


@dataclass(frozen=True)
class Trace:
    """What a fusion knows: a model's tensors in the order their gradients get ready."""

    nbytes: Sequence[int]


class Fusion(Protocol):
    """Cuts the tensors of a trace into consecutive slices that cover all of them.

    `cost` maps the bytes of one bucket to the seconds of its exchange.
    """

    def __call__(self, trace: Trace, cost: Callable[[int], float]) -> list[slice]: ...


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

    def __call__(
        self, trace: Trace, cost: Callable[[int], float] | None = None
    ) -> list[slice]:
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

    def __call__(
        self, trace: Trace, cost: Callable[[int], float] | None = None
    ) -> list[slice]:
        return [slice(i, i + 1) for i in range(len(trace.nbytes))]
