"""What all ranks add up at the end of backward, in one small message.

It says who used which parameters, and who met what is not finite. Once any rank has
been asked for a norm it also holds, of every parameter, the square of the 2-norm of
the mean: each rank adds up that of the part it owns. A rank's wish travels with the
message of one step and is granted by all in the next: so nobody asks by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtide.core.engine import Engine, InFlight
from gradtide.core.ops import AllReduce, Group
from gradtide.runtime.buckets import GradientBucket, Slot
from gradtide.runtime.nonfinite import NonFiniteGuard
from gradtide.runtime.placement import Placement


class Tally:
    """The message at the end of backward; `norms` are wished for by this rank."""

    def __init__(
        self, engine: Engine, placement: Placement, guard: NonFiniteGuard
    ) -> None:
        self._engine, self._placement, self._guard = engine, placement, guard
        self._answer: Callable[[], Any] | None = None
        self._measured = False  # the message on its way has norms
        self.wished = False  # this rank has been asked for norms
        self.granted = False  # all ranks send them from now on
        self.squares: dict[Slot, float] | None = None  # of the last step
        self.totals: dict[GradientBucket, float] = {}
        self.nonfinite: dict[GradientBucket, bool] = {}

    def ask(self, hold: bool) -> None:
        """Backward is over, and all has left; norms are for what is held."""
        self.learn()
        buckets = self._placement.buckets
        arrived = [slot.arrived for slot in self._placement.slots]
        # The training thread may finish them before the message is made.
        flights = [bucket.flight for bucket in buckets]
        self._measured = measured = self.granted and hold

        def message() -> AllReduce:
            flags = [*arrived, *self._guard.flags(), self.wished]
            if not measured:
                return AllReduce(torch.tensor(flags, dtype=torch.int32))
            owned = _owned(buckets, flights, self._engine.group)
            return AllReduce(torch.tensor([*flags, *owned], dtype=torch.float64))

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


def _owned(
    buckets: Sequence[GradientBucket],
    flights: Sequence[InFlight | None],
    group: Group,
) -> list[float]:
    """What this rank owns of the means (on the queue, where they are at their cut).

    Of each parameter the square of its norm; of each bucket whether it is not finite;
    and whether the squares are those of the bucket as a whole, in the first of its
    parameters: a part that is no slice of the bucket does not say which entries it has.
    """
    squares: list[float] = []
    bad, opaque = [], []
    for bucket, flight in zip(buckets, flights, strict=True):
        assert flight is not None
        part, begin = _share(bucket, flight, group)
        own = _squares(_pieces(bucket, part, begin))
        squares += own
        opaque.append(begin is None)
        bad.append(not math.isfinite(sum(own)) and not bool(part.isfinite().all()))
    return [*squares, *bad, *opaque]


def _share(
    bucket: GradientBucket, flight: InFlight, group: Group
) -> tuple[Tensor, int | None]:
    """This rank's part of the mean, and where in the bucket it begins, if it does."""
    rank, size = group
    flat = bucket.payload.flat
    length = flat.numel() // size
    begin = rank * length
    if flight.part is None:
        whole: Tensor = flight.mean
        return whole[begin : begin + length], begin
    address = flat.data_ptr() + begin * flat.element_size()
    sliced = flight.part.data_ptr() == address and flight.part.numel() == length
    return flight.part, begin if sliced else None


def _pieces(
    bucket: GradientBucket, part: Tensor, begin: int | None
) -> Sequence[Tensor]:
    """What of a part belongs to each slot of its bucket."""
    if begin is None:
        return [part, *(part[:0] for _ in bucket.slots[1:])]
    ends = [
        (slot.begin - begin, slot.begin - begin + slot.param.numel())
        for slot in bucket.slots
    ]
    return [part[max(first, 0) : max(last, 0)] for first, last in ends]


def _squares(pieces: Sequence[Tensor]) -> list[float]:
    half = pieces[0].dtype in (torch.float16, torch.bfloat16)
    wide = {"dtype": torch.float32} if half else {}
    norms = torch.stack(torch._foreach_norm(list(pieces), 2, **wide))
    found: list[float] = norms.double().square().tolist()
    return found
