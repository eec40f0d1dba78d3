"""What an exchange costs a rank's own processor: numbers, measured or imagined."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from gradtide.kfac.timing import CUBIC, InverseTime


def seconds(what: str, value: float) -> None:
    """Raise ValueError unless `value` can be a time."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value >= 0):
        raise ValueError(f"{what} is {value!r}: expected seconds, 0 or more")


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
    """What an exchange costs a rank's own processor. The default costs nothing.

    `take_in`: an element that is copied or added in a row, as when a gradient moves to
    its bucket. `select`: a selector's pass over a bucket, by the selector's class name.
    `scatter`: an entry that is read or written here and there. `nearby`: one that is
    close to the one before (None: as `scatter`). `sort`: an entry that is put in order.
    `optimizer`: an element of an optimizer's step, for traces that do not know.
    `request`: seconds to post any request. `overhead`: how many times what is counted
    an exchange costs a processor in training, by the collective's class name.

    For K-FAC, `inverse` is the time of an inversion by its rows (None: not measured;
    a mapping of its fields will do), and `product` that of a multiply-add of a product
    of matrices. Inversions run `beside` the training thread and the lane, as on a CPU;
    or on the lane, as on an accelerator.
    """

    take_in: Line = Line()
    select: Mapping[str, Line] = field(default_factory=dict)
    scatter: Line = Line()
    nearby: Line | None = None
    sort: Line = Line()
    optimizer: Line = Line()
    request: float = 0.0
    overhead: Mapping[str, float] = field(default_factory=dict)
    inverse: InverseTime | None = None
    product: Line = Line()
    beside: bool = True

    def __post_init__(self) -> None:
        seconds("Device(request=...)", self.request)
        # As they come from a file.
        if isinstance(self.inverse, Mapping):
            object.__setattr__(self, "inverse", InverseTime(**self.inverse))
        for name in ("product", "nearby"):
            if isinstance(found := getattr(self, name), Mapping):
                object.__setattr__(self, name, Line(**found))

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
# elements at a density of 1 %) and of `take_in` (a copy, ibid.); round numbers of the
# right order are all else: starts, `scatter`, `nearby`, `sort`, `optimizer`, `request`,
# `inverse` and `product`.
TYPICAL = Device(
    take_in=Line(5e-6, 1e-9),
    select={
        "Threshold": Line(5e-5, 3e-9),
        "Exact": Line(5e-5, 6e-8),
    },
    scatter=Line(5e-6, 5e-9),
    nearby=Line(5e-6, 2e-9),
    sort=Line(5e-6, 2e-8),
    optimizer=Line(5e-6, 2e-9),
    request=1e-4,
    inverse=CUBIC,
    product=Line(5e-6, 3e-11),
)
