"""Fusions by formula: from the sizes of tensors, or their times, to slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias

Cost: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class Trace:
    """What a fusion knows: a model's tensors in the order their gradients get ready.

    Seconds of the forward and of the backward are those that end when the tensor has
    been read for the first time, or when its gradient is ready; None: not measured.
    """

    nbytes: Sequence[int]
    forward: Sequence[float] | None = None
    backward: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            seconds = getattr(self, name)
            if seconds is not None and len(seconds) != len(self.nbytes):
                raise ValueError(
                    f"Trace: {len(seconds)} {name} times for {len(self.nbytes)} "
                    "tensors: give one for each"
                )


class Fusion(Protocol):
    """Cuts the tensors of a trace into consecutive slices that cover all of them.

    `cost` maps the bytes of one bucket to the seconds of its exchange.
    """

    def __call__(self, trace: Trace, cost: Cost) -> list[slice]: ...


@dataclass(frozen=True)
class BySize:
    """Cut buckets of at most so many megabytes, with small ones at both ends.

    A tensor that is larger than a bucket has one of its own, which it shares with what
    is before it if that is less than a tenth of a bucket: a start-up costs more than
    waiting for that tensor. The first and the last bucket are kept small, because
    little hides them: under DEAR the next forward waits for the first one last, and the
    last one leaves when backward has ended and is waited for first. This is the usual
    fusion by size, as DistributedDataParallel has it; it needs no measurement.

    Args:
        megabytes: The size of a bucket in MB (10^6 bytes), above 0. Larger buckets have
            fewer start-ups and less overlap. The default, 10.0, is a compromise for
            dense schemes; sparse recipes have 25.0, because starting their short
            messages is what takes time.
        ends: The size of the first and the last bucket in MB, above 0. A model of at
            most twice that is a single bucket. The default, 1.0, takes about 0.1 s at
            100 Mb/s.
        pieces: Into about how many buckets a model is cut that is smaller than this
            many buckets, 1 or more. More give more overlap in small models, and more
            start-ups.

    Raises:
        ValueError: A field is not positive.
    """

    megabytes: float = 10.0  # larger => fewer start-ups, less overlap
    ends: float = 1.0
    pieces: int = 3  # more => more overlap in small models, more start-ups

    def __post_init__(self) -> None:
        if not (self.megabytes > 0 and self.ends > 0 and self.pieces > 0):
            raise ValueError(
                f"{self}: sizes and counts of buckets are positive numbers"
            )

    def __call__(self, trace: Trace, cost: Cost | None = None) -> list[slice]:
        """Cut the tensors of a trace; `cost` is not used."""
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
    """Give every tensor a bucket of its own.

    It is the yardstick for what fusion saves: each tensor costs a start-up.
    """

    def __call__(self, trace: Trace, cost: Cost | None = None) -> list[slice]:
        """Cut the tensors of a trace; `cost` is not used."""
        return [slice(i, i + 1) for i in range(len(trace.nbytes))]


@dataclass(frozen=True)
class Cuts:
    """Cut buckets at given places, such as `gradtide plan` works out.

    It is for models with parameters of one dtype on one device.

    Args:
        ends: For every bucket how many tensors there are up to its end, counted in the
            order in which gradients get ready: ascending numbers from 1, of which the
            last is the number of all tensors.

    Raises:
        ValueError: `ends` does not ascend; or, when it is used, the model has another
            number of tensors.
    """

    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ends or any(b <= a for a, b in pairwise((0, *self.ends))):
            raise ValueError(
                "Cuts(ends=...): the ends of buckets are ascending counts from 1"
            )

    def __call__(self, trace: Trace, cost: Cost | None = None) -> list[slice]:
        """Cut the tensors of a trace; `cost` is not used."""
        if len(trace.nbytes) != self.ends[-1]:
            raise ValueError(
                f"{self} is for {self.ends[-1]} tensors of one dtype and device, and "
                f"here are {len(trace.nbytes)}: plan for this model"
            )
        return [slice(begin, end) for begin, end in pairwise((0, *self.ends))]


@dataclass(frozen=True)
class MgWfbp:
    """Merge tensors where waiting costs less than one more start-up.

    The rule is MG-WFBP's (Shi et al., INFOCOM 2019, arXiv:1811.11141). A tensor joins
    the bucket before it if that bucket would wait for it for less time than one
    exchange instead of two saves. The bucket's exchange could begin when its own
    gradients are ready and the exchanges before it have ended. It needs the backward
    times of a trace and a cost, so it works on the virtual clock; a training takes the
    `Cuts` that come of it.
    """

    def __call__(self, trace: Trace, cost: Cost) -> list[slice]:
        """Cut the tensors of a trace.

        Args:
            trace: Bytes and backward times of the tensors.
            cost: Seconds of the exchange of so many bytes.

        Returns:
            Consecutive slices of the tensors, one for each bucket.

        Raises:
            ValueError: The trace has no backward times, or nothing costs anything.
        """
        if trace.backward is None or not cost(1) > 0:
            raise ValueError(
                "MgWfbp() needs the backward time of every tensor and the cost of an "
                "exchange, which a training run does not know in advance: measure them "
                "with `gradtide profile` and train with the Cuts(...) that `gradtide "
                "plan` works out, or use BinarySearch() or Bayesian(), which measure "
                "during training"
            )
        nbytes, ready = trace.nbytes, list(accumulate(trace.backward))
        slices: list[slice] = []
        begin, filled, free = 0, 0, 0.0  # of the bucket being filled; of the network
        for i, n in enumerate(nbytes):
            if i > begin:
                start = max(free, ready[i - 1])
                saved = cost(filled) + cost(n) - cost(filled + n)
                if ready[i] - start >= saved:
                    slices.append(slice(begin, i))
                    begin, filled, free = i, 0, start + cost(filled)
            filled += n
        return [*slices, slice(begin, len(nbytes))] if nbytes else []


def overlapped(trace: Trace, slices: Sequence[slice], cost: Cost) -> float:
    """Seconds from the beginning of backward until all buckets have been exchanged.

    One exchange at a time, each as soon as the bucket is full: what a step takes beside
    its forward when means are needed at `step()`.
    """
    assert trace.backward is not None
    ready = list(accumulate(trace.backward))
    end = 0.0
    for piece in slices:
        end = max(end, ready[piece.stop - 1]) + cost(sum(trace.nbytes[piece]))
    return max(end, ready[-1])
