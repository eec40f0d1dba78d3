"""What a step exchanges, on the virtual clock: what each kind takes beside the wire.

[Note: Passes] Before the optimizer's step a local one compares parameters with what the
last exchange left. Afterwards it takes differences, restores, adds to what was left
behind, adds the mean, owes what was sent ahead, and remembers. Rounds of several steps
compare nothing; late means keep what was done meanwhile, and an outer momentum is
another tensor to read and write. All are passes over memory, each at the cost of taking
gradients in. A trace does not tell whether the optimizer is Adam, whose steps are
weighed on the queue: that is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gradtide.planner.trace import Unit
from gradtide.runtime.layout.buckets import LARGE, GradientBucket
from gradtide.runtime.notices import COUNT
from gradtide.scheme import Scheme

BEFORE, OFFERED, SETTLED = 1, 3, 3  # passes: see [Note: Passes]
LATE, MOMENTUM = 2, 3


class SimExchange(Protocol):
    """As `runtime.exchange.Exchange`, in what takes time.

    Attributes:
        eager: Buckets leave in backward.
        before: Passes over all gradients when the optimizer's step begins.
        flags: How many numbers ranks tell each other after backward, and before the
            optimizer's step; 0 of no message.
    """

    eager: bool

    @property
    def before(self) -> int: ...

    @property
    def flags(self) -> tuple[int, int]: ...

    def filled(self, bucket: GradientBucket) -> int:
        """Elements to take in as a bucket leaves."""

    def applied(self, bucket: GradientBucket) -> int | None:
        """Elements to pass over as its mean is applied; None: the optimizer does it."""


@dataclass(frozen=True)
class SimGradients:
    """Of gradients, large ones are taken in as they arrive."""

    units: Callable[[GradientBucket], list[Unit]]
    eager = True
    before = 0
    flags = 0, 0

    def filled(self, bucket: GradientBucket) -> int:
        return sum(u.numel for u in self.units(bucket) if u.numel < LARGE)

    def applied(self, bucket: GradientBucket) -> None:
        return None


@dataclass(frozen=True)
class SimSteps:
    """Steps, or rounds of several, see [Note: Passes]."""

    passes: int
    before: int
    flags: tuple[int, int]
    eager = False

    def filled(self, bucket: GradientBucket) -> int:
        return OFFERED * bucket.payload.flat.numel()

    def applied(self, bucket: GradientBucket) -> int:
        return self.passes * bucket.payload.flat.numel()


def exchange_of(
    scheme: Scheme,
    size: int,
    num_units: int,
    units: Callable[[GradientBucket], list[Unit]],
) -> SimExchange:
    """What a scheme exchanges among `size` ranks, of a model of so many units."""
    schedule = scheme.schedule
    if schedule.launch != "step":
        return SimGradients(units)
    momentum = scheme.outer is not None and scheme.outer.momentum > 0
    late = LATE if schedule.delay else 0
    passes = SETTLED + late + (MOMENTUM if momentum else 0)
    if schedule.rounds:  # also what is trained, and a checksum of what leaves
        return SimSteps(passes, 0, (size + COUNT + 1 + num_units + 2 * size, 0))
    return SimSteps(passes, BEFORE, (size + COUNT + 1, 1 + num_units))
