"""What every rank tells the others in the message that ends a backward.

Which message that is depends on what a step exchanges: the tally, or the flags of local
steps and of rounds. What ranks have to hear of each other whichever it is stands here:
that buffers are others than all agreed on, that a rank wants all to stop, or to decide
anew what to train with, that what it saves is not yet whole, or never will be; and how
much each rank counts (`weights`).

[Note: the same step] All ranks have to act on it after the same step. Where gradients
are there when backward is over, so is the answer, on every rank. Where updates are
deferred a rank may learn the answer at once, because it reads a parameter, and another
one as the next backward begins: so what counts is what all have heard by then, which is
the answer of the step before. In the silent steps of a round nothing is heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from gradtide.runtime import weights
from gradtide.runtime.buffers import SharedBuffers

if TYPE_CHECKING:
    from gradtide.core.grace import Grace

OWN = 6  # numbers in a message
COUNT = OWN + weights.COUNT


class Saves(Protocol):
    """Who saves this rank's states, in the background.

    Attributes:
        begun: How many saves have begun; alike on all ranks after the same step.
        torn: How many of the last two are not whole, yet or for ever; but for the very
            last one, saves are over.
        failures: How many have failed.
    """

    @property
    def begun(self) -> int: ...

    @property
    def torn(self) -> int: ...

    @property
    def failures(self) -> int: ...


@dataclass(frozen=True)
class Heard:
    """What all ranks together have said, up to a message.

    Attributes:
        stop: Whether some rank wants all to stop.
        decide: Whether some rank wants all to decide anew.
        failures: How many saves have failed, on all ranks together.
        whole: The last save, by its number, that is known to be whole on all ranks.
    """

    stop: bool = False
    decide: bool = False
    failures: int = 0
    whole: int = 0


class Notices:
    """This rank's part of the message, and what all say; see [Note: the same step].

    Attributes:
        stop: Whether this rank wants all to stop.
        decide: Whether it wants all to decide anew.
        saves: Who saves its states, if somebody does.
        weights: How much each rank counts.
        grace: By whom ranks that others wait for are asked to end their round, if so.
        last: What was heard in the last message that this rank has learned of.
        settled: What all ranks had heard when the backward of this step began.
    """

    saves: Saves | None

    def __init__(
        self, buffers: SharedBuffers, size: int = 1, grace: Grace | None = None
    ) -> None:
        self.weights, self.grace = weights.Weights(size), grace
        self.stop, self.decide, self.saves = False, False, None
        self.last = self.settled = Heard()
        self._buffers, self._begun = buffers, 0

    def follow(self, before: Notices) -> None:
        """Say on what was said among other ranks."""
        self.stop |= before.stop  # it may have been said meanwhile, by a signal
        self.saves = before.saves
        self.weights.renew(before.weights)

    def flags(self) -> list[int]:
        """This rank's part of a sum over all ranks (hot path)."""
        saves, torn, failures = self.saves, 0, 0
        if saves is not None:
            self._begun = saves.begun
            torn, failures = saves.torn, saves.failures
        wishes = self.stop, self.decide
        own = [self._buffers.changed(), *wishes, torn > 0, torn > 1, failures]
        return [*own, *self.weights.words()]

    def hear(self, told: Sequence[int]) -> None:
        """Take the sum of all ranks' flags."""
        changed, stop, decide, torn, before, failures = told[:OWN]
        self.weights.hear(told[OWN:])
        self._buffers.note(changed > 0)
        whole = self.last.whole
        if not before:
            whole = max(whole, self._begun - (torn > 0))
        wishes = self.last.stop or stop > 0, self.last.decide or decide > 0
        self.last = Heard(*wishes, int(failures), whole)

    def settle(self) -> None:
        """A backward has begun: what was told in earlier ones, all ranks have heard."""
        self.settled = self.last
        self._buffers.settle()

    def decided(self) -> None:
        """All have decided anew, and everything that was said has been heard."""
        self.decide = False
        self.last = replace(self.last, decide=False)
        self.settled = replace(self.settled, decide=False)
