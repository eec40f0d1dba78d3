"""Which gradients travel together: pure functions from tensor sizes to slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol


@dataclass(frozen=True)
class Trace:
    """What a fusion knows of a model: tensors in the order their gradients get ready."""

    nbytes: Sequence[int]


class Fusion(Protocol):
    """Cuts the tensors of a trace into consecutive slices that cover all of them.

    `cost` maps the bytes of one bucket to the seconds of its exchange.
    """

    def __call__(self, trace: Trace, cost: Callable[[int], float]) -> list[slice]: ...


@dataclass(frozen=True)
class BySize:
    """Buckets of at most `megabytes` MB (10^6 bytes); a larger tensor travels alone.

    The first and the last bucket are kept to `ends` MB. The first leaves early, and under
    DEAR it is what the next forward waits for last; the last leaves when backward has
    ended and is what the next forward waits for first: nothing is left to hide them.
    """

    megabytes: float = 10.0  # larger => fewer start-ups, less overlap
    ends: float = 1.0

    def __post_init__(self) -> None:
        if not self.megabytes > 0 or not self.ends > 0:
            raise ValueError(f"{self}: bucket sizes are positive numbers of megabytes")

    def __call__(
        self, trace: Trace, cost: Callable[[int], float] | None = None
    ) -> list[slice]:
        tail = len(trace.nbytes) - self._tail(trace.nbytes)
        slices: list[slice] = []
        begin, filled = 0, 0
        for i, nbytes in enumerate(trace.nbytes):
            limit = 1e6 * (self.megabytes if slices else self.ends)
            if filled and (filled + nbytes > limit or i == tail):
                slices.append(slice(begin, i))
                begin, filled = i, 0
            filled += nbytes
        if begin < len(trace.nbytes):
            slices.append(slice(begin, len(trace.nbytes)))
        return slices

    def _tail(self, nbytes: Sequence[int]) -> int:
        """The number of tensors in the last bucket."""
        sums = accumulate(reversed(nbytes))
        return max(1, sum(1 for filled in sums if filled <= 1e6 * self.ends))


@dataclass(frozen=True)
class PerTensor:
    """Every tensor in a bucket of its own: the un-fused yardstick."""

    def __call__(
        self, trace: Trace, cost: Callable[[int], float] | None = None
    ) -> list[slice]:
        return [slice(i, i + 1) for i in range(len(trace.nbytes))]
