"""What was seen of every contestant, and who was where when. Pure arithmetic.

[Note: The target] The loss that all race to is the lowest that one contestant, the
leader, had in its time, and a thousandth more: or the order of a sum would decide
whether one who takes the same steps is ever there. A contestant is there when its loss
is first at or below that; between two looks its course is taken for a straight line.
One rule for all, the leader included.

[Note: Times sooner] One moment of one run says little: a look that happened to be low
moves it. So the loss that counts is the lowest up to then, and who is how many times
sooner is asked at every loss that the leader had first in the second half of its time:
the median of these is told, with the lowest and the highest. Who never had a loss was
there 0 times as soon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

CLOSE = 1e-3  # of a loss: closer are two that took the same steps
STALLED = 2.0  # times its neighbours: so much longer no lap of the same work takes
AROUND = 2  # laps before and behind: a warm-up's are longer than those behind it


class Point(NamedTuple):
    """Where a contestant was when its held-out loss was looked at, or in between."""

    seconds: float  # of training, all ranks together
    steps: float
    sent_bytes: float  # by one rank
    loss: float


class Spread(NamedTuple):
    """How many times sooner one is than another, see [Note: Times sooner]."""

    median: float
    lowest: float
    highest: float


class Stall(NamedTuple):
    """A lap that took much longer than those around it, by where it began."""

    steps: float
    times: float


@dataclass(frozen=True)
class Standing:
    """One contestant's course; `arrival`: where it had the loss that was raced to."""

    scheme: str
    points: list[Point]
    arrival: Point | None = None
    sooner: Spread | None = (
        None  # than the leader; None: it never had any of the losses
    )

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def stalled(self) -> list[Stall]:
        return stalls(self.points)


def target(leading: Sequence[Point]) -> float:
    """The loss that is raced to, see [Note: The target]."""
    return (1 + CLOSE) * min(point.loss for point in leading)


def arrival(points: Sequence[Point], loss: float) -> Point | None:
    """Where the course first has `loss`; None if it never does."""
    for before, after in pairwise(points):
        if after.loss <= loss:
            # Who begins below it is there at once.
            share = max(0.0, before.loss - loss) / (before.loss - after.loss)
            both = zip(before, after, strict=True)
            return Point._make(a + share * (b - a) for a, b in both)
    return None


def standings(courses: dict[str, list[Point]], leader: str) -> list[Standing]:
    """All contestants by name, in the order of `courses`; `leader` sets the target."""
    leading = courses[leader]
    loss = target(leading)
    return [
        Standing(name, points, arrival(points, loss), sooner(leading, points))
        for name, points in courses.items()
    ]


def falling(points: Sequence[Point]) -> list[Point]:
    """The course with the lowest loss up to each look."""
    lowest = accumulate((point.loss for point in points), min)
    return [p._replace(loss=loss) for p, loss in zip(points, lowest, strict=True)]


def levels(leading: Sequence[Point]) -> list[float]:
    """The losses that the leader first had in the second half of its time."""
    half = leading[-1].seconds / 2
    late = [point.loss for point in falling(leading) if point.seconds >= half]
    return [(1 + CLOSE) * loss for loss in dict.fromkeys(late)]


def sooner(leading: Sequence[Point], other: Sequence[Point]) -> Spread | None:
    """How many times sooner `other` had the leader's losses; None: none of them."""
    ratios = []
    for loss in levels(leading):
        first, there = arrival(falling(leading), loss), arrival(falling(other), loss)
        if there is None:
            ratios.append(0.0)
        elif first is not None and first.seconds and there.seconds:
            ratios.append(first.seconds / there.seconds)
    if not any(ratios):
        return None
    return Spread(median(ratios), min(ratios), max(ratios))


def stalls(points: Sequence[Point]) -> list[Stall]:
    """Laps that took more than STALLED times the median of those around them."""
    laps = [(b.seconds - a.seconds) / (b.steps - a.steps) for a, b in pairwise(points)]
    found = []
    for i, lap in enumerate(laps):
        near = [*laps[max(i - AROUND, 0) : i], *laps[i + 1 : i + 1 + AROUND]]
        if near and lap > STALLED * median(near):
            found.append(Stall(points[i].steps, lap / median(near)))
    return found
