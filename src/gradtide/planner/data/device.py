"""What an exchange costs a rank's own processor: numbers, measured or imagined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from gradtide.kfac.costs import CUBIC, InverseTime

MOST = 1e6  # seconds: of anything, so that sums stay numbers


def seconds(what: str, value: float) -> None:
    """Raise ValueError unless `value` can be a time."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 <= value <= MOST):
        raise ValueError(f"{what} is {value!r}: expected seconds, 0 to {MOST:g}")


@dataclass(frozen=True)
class Line:
    """Seconds of work in the processor: `call` for each call, `each` per element."""

    call: float = 0.0
    each: float = 0.0

    def __post_init__(self) -> None:
        seconds("Line(call=...)", self.call)
        seconds("Line(each=...)", self.each)

    def __call__(self, elements: float, calls: float = 1) -> float:
        return self.call * calls + self.each * elements


@dataclass(frozen=True)
class Device:
    """What an exchange costs a rank's own processor. The default costs nothing."""

    take_in: Line = Line()  # an element that is copied or added in a row
    # A selector's pass over a bucket, by its class name.
    select: Mapping[str, Line] = field(default_factory=dict)
    scatter: Line = Line()  # an entry that is read or written here and there
    nearby: Line | None = None  # one that is close to the last; None: as `scatter`
    sort: Line = Line()  # an entry that is put in order
    optimizer: Line = Line()  # an element of a step, for traces that do not know
    request: float = 0.0  # seconds to post any request
    # How many times what is counted an exchange costs a processor in training, by the
    # collective's class name.
    overhead: Mapping[str, float] = field(default_factory=dict)
    # For K-FAC; inversions run beside the training thread and the queue, as on a CPU,
    # or on the queue, as on an accelerator.
    inverse: InverseTime | None = None  # by rows; None: not measured
    product: Line = Line()  # a multiply-add of a product of matrices
    beside: bool = True
    name: str = ""  # of what it stands for; empty: it was measured

    def __post_init__(self) -> None:
        seconds("Device(request=...)", self.request)
        for name, factor in self.overhead.items():
            if not 0 <= factor <= MOST:
                raise ValueError(f"overhead of {name} is {factor!r}: a factor")
        if self.inverse is not None:
            seconds("InverseTime(start=...)", self.inverse.start)
            seconds("InverseTime(slope=...)", self.inverse.slope)

    def overhead_of(self, collective: str) -> float:
        """The factor of a collective; of one that was not measured, the mean of all."""
        if collective in self.overhead or not self.overhead:
            return self.overhead.get(collective, 1.0)
        return fmean(self.overhead.values())

    def selecting(self, selector: str) -> Line:
        """The time of a selector; of one that was not measured, that of the slowest."""
        if selector in self.select:
            return self.select[selector]
        return max(self.select.values(), key=lambda line: line.each, default=Line())


# Two cores of a virtual machine (AMD EPYC), one thread, arrays beyond the caches.
# Measured are the elements of `select` (benchmarks/records/selection_202611.json, 1e7
# elements at a density of 1 %) and of `copy_in` (a copy, ibid.); round numbers of the
# right order are all else: starts, `scatter`, `nearby`, `sort`, `optimizer`, `request`,
# `inverse` and `product`.
TYPICAL = Device(
    take_in=Line(5e-6, 1e-9),
    select={"Threshold": Line(5e-5, 3e-9), "Exact": Line(5e-5, 6e-8)},
    scatter=Line(5e-6, 5e-9),
    nearby=Line(5e-6, 2e-9),
    sort=Line(5e-6, 2e-8),
    optimizer=Line(5e-6, 2e-9),
    request=1e-4,
    inverse=CUBIC,
    product=Line(5e-6, 3e-11),
    name="a core of a CPU (AMD EPYC, one thread)",
)
