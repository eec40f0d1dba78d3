"""What was seen of every contestant, and who was where when. Pure arithmetic.

[Note: The target] The loss that all race to is the lowest that one contestant, the
leader, had in its time, and a thousandth more: or the order of a sum would decide
whether one who takes the same steps is ever there. A contestant is there when its loss
is first at or below that; between two looks its course is taken for a straight line.
One rule for all, the leader included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

CLOSE = 1e-3  # of a loss: closer are two that took the same steps


class Point(NamedTuple):
    """Where a contestant was when its held-out loss was looked at, or in between."""

    seconds: float  # of training, all ranks together
    steps: float
    sent_bytes: float  # by one rank
    loss: float


@dataclass(frozen=True)
class Standing:
    """One contestant's course; `arrival`: where it had the loss that was raced to."""

    scheme: str
    points: list[Point]
    arrival: Point | None = None

    @property
    def last(self) -> Point:
        return self.points[-1]


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
    loss = target(courses[leader])
    return [
        Standing(name, points, arrival(points, loss))
        for name, points in courses.items()
    ]
