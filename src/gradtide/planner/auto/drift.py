"""Whether steps have come to take longer, or shorter, than after a decision.

Knows moments of one rank, and neither steps nor ranks: who looks on, and what follows
from it, is `selector`'s.

[Note: For long] An evaluation, a save or a bad minute is no reason to plan anew. What
counts is the median of the last STEPS steps, against that of the first few after a
decision: a network may change soon, and where steps are slow, many take long. Where it
was looked at in vain, it is looked at again after twice as long, so that measuring
costs less and less of a training that changes for other reasons.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from statistics import median

STEPS = 20  # that a median is of
FIRST = 5  # that the first is of
CHANGED = 1.5  # by this factor or more
FEWEST = 3  # rounds, that a median is of


class Drift:
    """Looks at the moments at which steps, or rounds, are over.

    Attributes:
        seen: Whether they take longer, or shorter, than they did. It lasts.
    """

    def __init__(self, every: int = 1, breaks: Sequence[int] = ()) -> None:
        """`every`: steps of a round; `breaks`: how many steps of the training are over
        when others begin, as those after a warm-up; ascending."""
        self._breaks, self._stage = breaks, 0
        self._of = max(STEPS // every, FEWEST)
        self._first = min(FIRST, self._of)
        self._recent: deque[float] = deque(maxlen=self._of)
        self._usual: float | None = None
        self._last: float | None = None
        self._pause, self._rest = 0, 0
        self.seen = False

    def note(self, now: float, steps: int) -> None:
        """A step, or a round, is over at `now` (seconds), after so many (hot path)."""
        last, self._last = self._last, now
        stage = bisect(self._breaks, steps)
        if stage != self._stage:
            self._stage = stage
            self._begin()
        elif last is not None:
            self._recent.append(now - last)
        if self._usual is None and len(self._recent) == self._first:
            self._usual = median(self._recent)
            self._recent.clear()
        if self._usual is None or len(self._recent) < self._of:
            return
        if self._rest:
            self._rest -= 1
        else:
            ratio = median(self._recent) / self._usual
            self.seen |= not 1 / CHANGED < ratio < CHANGED

    def look_later(self) -> None:
        """It was no reason for anything: take what is there for what is usual."""
        self._pause = 2 * self._pause + self._of
        self._begin()
        self._rest = self._pause

    def _begin(self) -> None:
        self._usual, self._last, self.seen = None, None, False
        self._recent.clear()
