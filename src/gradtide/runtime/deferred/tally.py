"""What all ranks add up at the end of backward, in one small message.

It says who used which parameters, who met what is not finite, and whether GradScalers
have the same scale; the notices that go with any such message are in it (`notices`),
and now and then a checksum of each rank's parameters. Once any rank has been asked for
a norm it also holds, of every parameter, the square of the 2-norm of the mean: each
rank adds up that of the part it owns. A rank's wish travels with the message of one
step and is granted by all in the next: so nobody asks by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradtide.core.engine import Engine
from gradtide.core.ops import AllReduce
from gradtide.core.payload import traits
from gradtide.runtime.deferred.partial_norms import measure
from gradtide.runtime.guards.checksum import ParameterCheck
from gradtide.runtime.guards.nonfinite import NonFiniteGuard
from gradtide.runtime.guards.scales import Scales
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.placement import Placement
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.notices import COUNT, Notices


@dataclass(eq=False)
class Tally:
    """The message at the end of backward; `norms` are wished for by this rank."""

    _engine: Engine
    _placement: Placement
    _guard: NonFiniteGuard
    _check: ParameterCheck
    _notices: Notices
    _scales: Scales
    _answer: Callable[[], Any] | None = None
    _measured: bool = False  # the message on its way has norms
    wished: bool = False  # this rank has been asked for norms
    granted: bool = False  # all ranks send them from now on
    squares: dict[Slot, float] | None = None  # of the last step
    totals: dict[GradientBucket, float] = field(default_factory=dict)
    nonfinite: dict[GradientBucket, bool] = field(default_factory=dict)

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
        words, scales = self._check.words(abstain), self._scales.words(abstain)
        notices = self._notices.flags()
        self._measured = measured = self.granted and hold

        def message() -> AllReduce:
            own = *notices, self.wished
            flags = [*arrived, *words(), *scales(), *self._guard.flags(), *own]
            if not measured:
                return AllReduce(torch.tensor(flags, dtype=torch.int32, device="cpu"))
            norms = measure(buckets, flights, self._engine.group)
            return AllReduce(
                torch.tensor([*flags, *norms], dtype=torch.float64, device="cpu")
            )

        self._answer = self._engine.ask("used", message, settled=measured)

    def learn(self) -> None:
        """Learn what all ranks say, if they have been asked."""
        if self._answer is None:
            return
        told = iter(self._answer().tolist())
        self._answer = None
        slots, buckets = list(self._placement.slots), self._placement.buckets
        for slot, count in zip(slots, told, strict=False):
            slot.used = count > 0
        self._check.update(told)
        self._scales.update(told)
        numbers = [*told]
        self.squares = None
        if self._measured:
            count = len(slots) + 2 * len(buckets)
            self._note(slots, iter(numbers[-count:]))
            del numbers[-count:]
        self.granted |= numbers.pop() > 0
        self._notices.hear(numbers[-COUNT:])
        self._guard.update(numbers[:-COUNT])
        if (factor := self._notices.weights.factor) != 1:
            self._multiply(factor)

    def _multiply(self, factor: float) -> None:
        """Have means multiplied that are of all that there was, and their norms."""
        for bucket in self._placement.buckets:
            if not bucket.whole:
                continue
            bucket.factor = factor
            if self.squares is None:
                continue
            self.totals[bucket] *= factor**2
            for slot in self.squares.keys() & {*bucket.slots}:
                self.squares[slot] *= factor**2

    def _note(self, slots: Sequence[Slot], norms: Iterator[float]) -> None:
        """Take in what `measure` has told, added up over all ranks.

        What arrived of slots that no rank used is dropped, and counts as nothing. Where
        only the norm of a bucket as a whole is known, it may be in there.
        """
        buckets, known = self._placement.buckets, True
        squares = dict(zip(slots, norms, strict=False))
        self.totals = {b: sum(squares[slot] for slot in b.slots) for b in buckets}
        self.nonfinite = {b: n > 0 for b, n in zip(buckets, norms, strict=False)}
        for bucket, opaque in zip(buckets, norms, strict=True):
            unused = [slot for slot in bucket.slots if not slot.used]
            if unused and traits(bucket.collective).residual:
                known &= not opaque or len(unused) == len(bucket.slots)
                squares |= dict.fromkeys(unused, 0.0)
                self.totals[bucket] = sum(squares[slot] for slot in bucket.slots)
            if opaque:
                for slot in bucket.slots:
                    del squares[slot]
        self.squares = squares if known else None
