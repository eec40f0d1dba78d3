"""Fusions that are searched for: which size of bucket is tried next.

A search is a pure function of what was tried before: the same trials give the same next
size, on every rank and after a restart. Sizes are searched on a logarithmic scale,
between the smallest that is asked for and the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from gradtide.fusion.base import Cost, Fusion, Trace
from gradtide.fusion.bayesian import require, suggest
from gradtide.fusion.mgwfbp import overlapped
from gradtide.fusion.sizes import BySize

FIRST = 25.0  # MB: what DDP and DeAR begin with
SHIFT = 0.1  # of the interval: how far a binary search looks to either side
DIGITS = 3  # of a size: more tell apart what makes no difference


class Trial(NamedTuple):
    """A size of buckets that was tried, and the seconds of a step with it."""

    megabytes: float
    seconds: float


@runtime_checkable
class Search(Protocol):
    """A fusion that is found by trying: a frozen dataclass.

    `steps` is how many steps are measured for a trial during training.
    """

    @property
    def steps(self) -> int: ...
    @property
    def smallest(self) -> float: ...
    def at(self, megabytes: float) -> BySize:
        """The fusion that is tried with this size of buckets."""
        ...

    def propose(self, whole: int, tried: Sequence[Trial]) -> float | None:
        """The next size to try, in MB, for a model of `whole` bytes; None: enough."""
        ...

    def __call__(self, trace: Trace, cost: Cost) -> list[slice]: ...


def best(tried: Sequence[Trial]) -> Trial:
    """The fastest trial; of equals the first."""
    return min(tried, key=lambda trial: trial.seconds)


def search(
    fusion: Search, whole: int, seconds: Callable[[Fusion], float]
) -> list[Trial]:
    """All trials of a search for a model of `whole` bytes, in turn.

    `seconds` says what a step takes with a fusion: a simulation, or a formula.
    """
    tried: list[Trial] = []
    while (size := fusion.propose(whole, tried)) is not None:
        tried.append(Trial(size, seconds(fusion.at(size))))
    return tried


@dataclass(frozen=True)
class _Sizes:
    """What searches for the size of buckets have in common."""

    trials: int
    steps: int = 5  # that are measured for a trial: more, less noise
    smallest: float = 0.5  # MB
    ends: float = 1.0  # MB, see BySize

    def __post_init__(self) -> None:
        if self.trials < 1 or self.steps < 1:
            raise ValueError(f"{self}: at least one trial of at least one step")
        if not (self.smallest > 0 and self.ends > 0):
            raise ValueError(f"{self}: sizes of buckets are positive numbers")

    def at(self, megabytes: float) -> BySize:
        return BySize(megabytes, ends=min(self.ends, megabytes), pieces=1)

    def propose(self, whole: int, tried: Sequence[Trial]) -> float | None:
        if len(tried) >= self.trials:
            return None
        # The sizes (MB) between which something changes.
        high = max(whole / 1e6, 1e-6)
        return self._next(min(self.smallest, high), high, tried)

    def _next(self, low: float, high: float, tried: Sequence[Trial]) -> float | None:
        raise NotImplementedError

    def __call__(self, trace: Trace, cost: Cost) -> list[slice]:
        """By formula; of the first size where nothing is known."""
        whole = sum(trace.nbytes)
        tried: Sequence[Trial] = ()
        if trace.backward is not None and cost(1) > 0:
            tried = search(
                self, whole, lambda sized: overlapped(trace, sized(trace, cost), cost)
            )
        size = best(tried).megabytes if tried else self.propose(whole, ())
        return self.at(self.smallest if size is None else size)(trace)


@dataclass(frozen=True)
class BinarySearch(_Sizes):
    """TopKA2A's search for the size of buckets (Li, ICPP 2024, algorithm 2).

    The interval is halved: a little to the left and to the right of its middle a step
    is timed, and the half on the slower side is given up. What counts in the end is
    the fastest of all trials. A trial that would repeat an earlier one is not made.

    Called without times to go by, as when training begins, it cuts at the first size.
    """

    trials: int = 12

    def _next(self, low: float, high: float, tried: Sequence[Trial]) -> float | None:
        known = dict(tried)
        asking = _halving(low, high)
        size = next(asking, None)
        while size is not None and size in known:
            try:
                size = asking.send(known[size])
            except StopIteration:
                return None
        return size


def _halving(low: float, high: float) -> Generator[float, float, None]:
    """Yields sizes to time, and is sent their seconds."""
    a, b = math.log(low), math.log(high)
    while True:
        middle, shift = (a + b) / 2, SHIFT * (b - a)
        left = _rounded(math.exp(middle - shift))
        right = _rounded(math.exp(middle + shift))
        if left == right:
            yield left
            return
        if (yield left) <= (yield right):
            b = middle
        else:
            a = middle


@dataclass(frozen=True)
class Bayesian(_Sizes):
    """DeAR's search for the size of buckets (Zhang et al., ICDCS 2023).

    A Gaussian process is fitted to the logarithm of the times; tried is next where it
    expects the largest improvement. The first sizes are given: they span the range.
    Needs the extra `tune` (the library bayesian-optimization).

    Called without times to go by, as when training begins, it cuts at the first size.
    """

    trials: int = 15
    seed: int = 0

    def __post_init__(self) -> None:
        require()  # before a training begins
        super().__post_init__()

    def _next(self, low: float, high: float, tried: Sequence[Trial]) -> float | None:
        first = _spread(low, high)
        if len(tried) < len(first):
            return first[len(tried)]
        return _expected(low, high, tried, self.seed)


def _spread(low: float, high: float) -> list[float]:
    """The first sizes: FIRST, both ends, and what divides the range between evenly."""
    begin = _rounded(min(max(FIRST, low), high))
    steps = [low * (high / low) ** (i / 4) for i in (0, 4, 2, 1, 3)]
    return list(dict.fromkeys([begin, *map(_rounded, steps)]))[:5]


def _expected(
    low: float, high: float, tried: Sequence[Trial], seed: int
) -> float | None:
    """Where the library expects most; if it was there already, beside the best."""
    size = _rounded(math.exp(suggest(math.log(low), math.log(high), tried, seed)))
    known = sorted(trial.megabytes for trial in tried)
    if size not in known:
        return size
    here = known.index(best(tried).megabytes)
    beside = [*known[max(here - 1, 0) : here], *known[here + 1 : here + 2]]
    widest = max(beside, key=lambda x: abs(math.log(x / known[here])), default=size)
    size = _rounded(math.sqrt(widest * known[here]))
    return None if size in known else size


def _rounded(megabytes: float) -> float:
    """To DIGITS, so that the fusion can be read."""
    return float(f"{megabytes:.{DIGITS}g}")
