"""Fusions that are searched for: which size of bucket is tried next.

A search is a pure function of the trials before, on every rank and after a restart.
Sizes are searched on a logarithmic scale, from the smallest that is asked for to the
whole model.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from gradtide.fusion.formulas import BySize, Cost, Fusion, Trace, overlapped

FIRST = 25.0  # MB: what DDP and DeAR begin with
SHIFT = 0.1  # of the interval: how far a binary search looks to either side
DIGITS = 3  # of a size: more tell apart what makes no difference
EXPLORE = 0.01  # improvement, in units of the targets, that is not worth a trial
NOISE = 1e-3  # variance of a target beside the spread of all: jumps at bucket bounds


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

    def propose(self, whole: int, tried: Sequence[Trial]) -> float | None:
        """The next size to try, in MB, for a model of `whole` bytes; None: enough."""

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
class BinarySearch:
    """Search for the size of buckets by halving an interval, during training.

    This is the search of TopKA2A (Li, ICPP 2024, algorithm 2), on a logarithmic scale.
    A little to the left and to the right of the interval's middle a step is timed, and
    the half on the slower side is given up. What counts in the end is the fastest of
    all trials. A trial that would repeat an earlier one is not made.

    Cost: 100 to 120 steps of the training that are slower or faster than the others;
    its values stay the same, up to the order in which more than two ranks' numbers are
    added.

    Args:
        trials: How many sizes are tried at most, 1 or more. The default, 12, halves the
            interval six times.
        steps: How many steps are measured for a trial, 1 or more. More lessen the
            noise, and take longer. The default is 5, of which the median counts.
        smallest: The smallest size that is tried, in MB (10^6 bytes), above 0. The
            largest is the whole model. Below the default, 0.5, start-ups usually
            outweigh all else.
        ends: The size of the first and the last bucket in MB, above 0, as of `BySize`.

    Raises:
        ValueError: A field is outside its range.
    """

    trials: int = 12
    steps: int = 5  # that are measured for a trial: more, less noise
    smallest: float = 0.5  # MB
    ends: float = 1.0  # MB, see BySize

    def __post_init__(self) -> None:
        _check(self)

    def at(self, megabytes: float) -> BySize:
        """Return the fusion that is tried with buckets of this size, in MB."""
        return _sized(megabytes, self.ends)

    def propose(self, whole: int, tried: Sequence[Trial]) -> float | None:
        """Return the next size in MB for a model of `whole` bytes; None at the end."""
        if len(tried) >= self.trials:
            return None
        known = dict(tried)
        a, b = map(math.log, _range(self.smallest, whole))
        while True:
            middle, shift = (a + b) / 2, SHIFT * (b - a)
            left = _rounded(math.exp(middle - shift))
            right = _rounded(math.exp(middle + shift))
            for size in (left, right):
                if size not in known:
                    return size
            if left == right:
                return None
            if known[left] <= known[right]:
                b = middle
            else:
                a = middle

    def __call__(self, trace: Trace, cost: Cost) -> list[slice]:
        """Cut by the best size of a formula; without times, by the first size."""
        return _cut(self, trace, cost)


@dataclass(frozen=True)
class Bayesian:
    """Search for the size of buckets by Bayesian optimisation, during training.

    This is the search of DeAR (Zhang et al., ICDCS 2023). A Gaussian process is fitted
    to the logarithm of the times, and the size that is tried next is the one where it
    expects the largest improvement. The first five sizes span the range.

    Cost: 130 to 150 steps of the training that are slower or faster than the others;
    its values stay the same, up to the order in which more than two ranks' numbers are
    added. It needs the library bayesian-optimization, which the extra `tune` installs.

    Args:
        trials: How many sizes are tried at most, 1 or more. The default is 15: the five
            that span the range and ten that are chosen.
        steps: How many steps are measured for a trial, 1 or more. More lessen the
            noise, and take longer. The default is 5, of which the median counts.
        smallest: The smallest size that is tried, in MB (10^6 bytes), above 0. The
            largest is the whole model. Below the default, 0.5, start-ups usually
            outweigh all else.
        ends: The size of the first and the last bucket in MB, above 0, as of `BySize`.
        seed: The seed of the library's random numbers. Any will do; it is fixed so that
            a search can be repeated.

    Raises:
        ValueError: A field is outside its range, or the library is missing.
    """

    trials: int = 15
    steps: int = 5  # that are measured for a trial: more, less noise
    smallest: float = 0.5  # MB
    ends: float = 1.0  # MB, see BySize
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)
        if importlib.util.find_spec("bayes_opt") is None:  # before a training begins
            raise ValueError(
                "Bayesian() needs the library bayesian-optimization: "
                "pip install 'gradtide[tune]', or use BinarySearch()"
            )

    def at(self, megabytes: float) -> BySize:
        """Return the fusion that is tried with buckets of this size, in MB."""
        return _sized(megabytes, self.ends)

    def propose(self, whole: int, tried: Sequence[Trial]) -> float | None:
        """Return the next size in MB for a model of `whole` bytes; None at the end."""
        if len(tried) >= self.trials:
            return None
        low, high = _range(self.smallest, whole)
        first = _spread(low, high)
        if len(tried) < len(first):
            return first[len(tried)]
        # Where the library expects most; if it was there already, beside the best.
        ends = math.log(low), math.log(high)
        size = _rounded(math.exp(_suggested(*ends, tried, self.seed)))
        known = sorted(trial.megabytes for trial in tried)
        if size not in known:
            return size
        here = known.index(best(tried).megabytes)
        beside = [*known[max(here - 1, 0) : here], *known[here + 1 : here + 2]]
        widest = max(beside, key=lambda x: abs(math.log(x / known[here])), default=size)
        size = _rounded(math.sqrt(widest * known[here]))
        return None if size in known else size

    def __call__(self, trace: Trace, cost: Cost) -> list[slice]:
        """Cut by the best size of a formula; without times, by the first size."""
        return _cut(self, trace, cost)


def _check(fusion: BinarySearch | Bayesian) -> None:
    if fusion.trials < 1 or fusion.steps < 1:
        raise ValueError(f"{fusion}: at least one trial of at least one step")
    if not (fusion.smallest > 0 and fusion.ends > 0):
        raise ValueError(f"{fusion}: sizes of buckets are positive numbers")


def _sized(megabytes: float, ends: float) -> BySize:
    return BySize(megabytes, ends=min(ends, megabytes), pieces=1)


def _range(smallest: float, whole: int) -> tuple[float, float]:
    """The sizes (MB) between which something changes."""
    high = max(whole / 1e6, 1e-6)
    return min(smallest, high), high


def _cut(fusion: Search, trace: Trace, cost: Cost) -> list[slice]:
    whole = sum(trace.nbytes)
    tried: Sequence[Trial] = ()
    if trace.backward is not None and cost(1) > 0:
        tried = search(
            fusion, whole, lambda sized: overlapped(trace, sized(trace, cost), cost)
        )
    size = best(tried).megabytes if tried else fusion.propose(whole, ())
    return fusion.at(fusion.smallest if size is None else size)(trace)


def _spread(low: float, high: float) -> list[float]:
    """The first sizes: FIRST, both ends, and what divides the range between evenly."""
    begin = _rounded(min(max(FIRST, low), high))
    steps = [low * (high / low) ** (i / 4) for i in (0, 4, 2, 1, 3)]
    return list(dict.fromkeys([begin, *map(_rounded, steps)]))[:5]


def _suggested(low: float, high: float, tried: Sequence[Trial], seed: int) -> float:
    """Where between `low` and `high` (logarithms of MB) to try next."""
    from bayes_opt import BayesianOptimization, acquisition

    optimizer = BayesianOptimization(
        None,
        {"size": (low, high)},
        acquisition_function=acquisition.ExpectedImprovement(xi=EXPLORE),
        random_state=seed + len(tried),
        verbose=0,
        allow_duplicate_points=True,
    )
    optimizer.set_gp_params(alpha=NOISE)
    for megabytes, seconds in tried:
        size = min(max(math.log(megabytes), low), high)  # it was rounded
        optimizer.register({"size": size}, -math.log(seconds))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fit: that a length scale is at a bound
        return float(optimizer.suggest()["size"])


def _rounded(megabytes: float) -> float:
    """To DIGITS, so that the fusion can be read."""
    return float(f"{megabytes:.{DIGITS}g}")
