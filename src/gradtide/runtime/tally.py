"""What all ranks add up at the end of backward, in one small message.

It says who used which parameters, and who met what is not finite; now and then it has
a checksum of each rank's parameters. Once any rank has
been asked for a norm it also holds, of every parameter, the square of the 2-norm of
the mean: each rank adds up that of the part it owns. A rank's wish travels with the
message of one step and is granted by all in the next: so nobody asks by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradtide.core.engine import Engine
from gradtide.core.ops import AllReduce
from gradtide.runtime.buckets import GradientBucket, Slot
from gradtide.runtime.checksum import ParameterCheck
from gradtide.runtime.nonfinite import NonFiniteGuard
from gradtide.runtime.owned import measure
from gradtide.runtime.placement import Placement


class Tally:
    """The message at the end of backward; `norms` are wished for by this rank."""

    def __init__(
        self,
        engine: Engine,
        placement: Placement,
        guard: NonFiniteGuard,
        check: ParameterCheck,
    ) -> None:
        self._engine, self._placement = engine, placement
        self._guard, self._check = guard, check
        self._answer: Callable[[], Any] | None = None
        self._measured = False  # the message on its way has norms
        self.wished = False  # this rank has been asked for norms
        self.granted = False  # all ranks send them from now on
        self.squares: dict[Slot, float] | None = None  # of the last step
        self.totals: dict[GradientBucket, float] = {}
        self.nonfinite: dict[GradientBucket, bool] = {}

    def ask(self, hold: bool, abstain: bool = False) -> None:
        """Backward is over, and all has left; norms are for what is held.

        A rank abstains whose parameters are known to be behind the others'.
        """
        self.learn()
        buckets = self._placement.buckets
        slots = self._placement.slots
        arrived = [slot.arrived and not slot.undefined for slot in slots]
        # The training thread may finish them before the message is made.
        flights = [bucket.flight for bucket in buckets]
        words = self._check.words(abstain)
        self._measured = measured = self.granted and hold

        def message() -> AllReduce:
            flags = [*arrived, *words(), *self._guard.flags(), self.wished]
            if not measured:
                return AllReduce(torch.tensor(flags, dtype=torch.int32))
            norms = measure(buckets, flights, self._engine.group)
            return AllReduce(torch.tensor([*flags, *norms], dtype=torch.float64))

        self._answer = self._engine.ask("used", message, settled=measured)

    def learn(self) -> None:
        """Learn what all ranks say, if they have been asked."""
        if self._answer is None:
            return
        numbers: list[Any] = self._answer().tolist()
        self._answer = None
        slots, buckets = list(self._placement.slots), self._placement.buckets
        for slot, count in zip(slots, _take(numbers, len(slots)), strict=True):
            slot.used = count > 0
        rest = iter(numbers)
        self._check.update(rest)
        numbers = [*rest]
        self.squares = None
        if self._measured:
            opaque = _take(numbers, -len(buckets))
            bad = _take(numbers, -len(buckets))
            squares = dict(zip(slots, _take(numbers, -len(slots)), strict=True))
            self._note(squares, bad, opaque)
        self.granted |= numbers.pop() > 0
        self._guard.update(numbers)

    def _note(
        self, squares: dict[Slot, float], bad: Sequence[float], opaque: Sequence[float]
    ) -> None:
        buckets = self._placement.buckets
        self.totals = {b: sum(squares[slot] for slot in b.slots) for b in buckets}
        self.nonfinite = {b: n > 0 for b, n in zip(buckets, bad, strict=True)}
        for bucket, number in zip(buckets, opaque, strict=True):
            if number:
                for slot in bucket.slots:
                    del squares[slot]
        self.squares = squares


def _take(numbers: list[Any], count: int) -> list[Any]:
    """Take so many numbers out: from the front, or below zero from the end."""
    where = slice(count) if count > 0 else slice(count, None) if count else slice(0)
    taken = numbers[where]
    del numbers[where]
    return taken
