"""How much each rank counts in a mean, and how all ranks hear of it.

Ranks whose losses are means over unequally many tokens, or samples, say how many they
have. The mean over ranks is then sum_r w_r g_r / sum_r w_r. A rank that skips a step,
or that has run out of batches where weights are given, counts by 0. The weights are
added up in the message that ends a backward anyway (`notices`), as whole numbers: so
the sum has no rounding, and is the same on every rank.

[Note: unit] Gradients leave before the sum is known. So they leave as w_r / unit times
what they are, and a mean of everything is multiplied by unit / (mean of w) when it is
made use of: the unit cancels out. It keeps what travels, and stays, as large as plain
gradients, for narrow wires. All ranks agree on it as the first backward begins, and it
follows the mean of the weights slowly. Weights that are all equal are the unit, and
change no bit.

[Note: selections] What is delivered of a selection is mostly of earlier steps, and what
those were worth does not depend on how many tokens this one has: after a short last
batch it would be far too much. So such a mean stays as it is: a rank's gradient counts
w_r / unit times, and the conservation law holds for these.

Where steps are exchanged, all hear the sum before anything leaves, and what a rank has
done counts by its share, w_r / (mean of w); of a round w_r is the sum over its steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from gradtide.core.engine import Engine
from gradtide.core.ops import AllGather
from gradtide.runtime.members import EVERYBODY, Members

BITS, DIGITS = 16, 8  # of a sum: 32768 ranks can add up such digits in 32 bits
SCALE = 1 << 73  # all bits of a weight are whole then, and sums of 36000 have digits
COUNT = DIGITS + 3  # numbers in a message
LEAST, MOST = 1e-6, 1e12
SLOWLY = 16  # steps, in which the unit follows
UNKNOWN, NONE = math.nan, -1.0  # in the place of a weight: not given; no gradients

MIXED = (
    "some ranks gave a weight for this step, and others none: call sync.weight(n) "
    "before the first backward of each step, on every rank, or sync.skip() in the "
    "place of a backward"
)


class Weights:
    """This rank's weight, and what all ranks have made of theirs.

    Attributes:
        members: The ranks that have batches.
        agreed: Whether ranks have agreed on a unit.
        weighed: Whether they do weigh, where gradients are exchanged.
        unit: See [Note: unit].
        share: By what is multiplied what this rank's steps did.
        factor: By what a mean of all that there is of gradients is multiplied.
    """

    def __init__(self, size: int = 1) -> None:
        self._size = size
        self.members: Members = EVERYBODY
        self.agreed = self.weighed = False
        self.unit = self.share = self.factor = 1.0
        self._known: float | None = None  # the unit of a run that goes on here
        self._given: float | None = None
        self._gave = False  # ever
        self._skips = self._taken = False  # by a backward that is over
        self._last = 1.0  # of the last backward that is over
        self._usual = 1.0  # of the last one that was not 0
        self._told, self._mean = SCALE, 1.0
        self._mixed = False
        # Of steps that no message has told of: whether some had a weight, or none.
        self._some_given = self._some_plain = False
        self._told_of = False  # a message has told of the step under way
        # Where steps are exchanged: of all steps, and as of when fragments left last.
        self._sum, self._sent = 0.0, dict[int, float]()
        self._leaving: Sequence[int] = ()
        self._steps, self._closing = 1, False

    # - What the program says ----------------------------------------------------------

    def give(self, weight: float) -> None:
        """Set this rank's weight for the step to come; ValueError if it is none."""
        try:
            value = float(weight)
        except (TypeError, ValueError, RuntimeError):  # as of several elements
            value = math.nan
        if value != 0 and not LEAST <= value <= MOST:  # nor is a NaN
            raise ValueError(
                f"weight({weight!r}): pass what the loss of this rank's step is a mean "
                f"over, a number of tokens or samples: 0, or from {LEAST} to {MOST}"
            )
        if self.agreed and not self.weighed:
            raise RuntimeError(
                "weight() for the first time after gradients were exchanged without: "
                "call it from the first step on, on every rank"
            )
        self._given, self._gave, self._taken = value, True, False

    def skip(self) -> None:
        """This rank gives nothing in the backward that is under way."""
        self._skips = True

    # - A step -------------------------------------------------------------------------

    @property
    def own(self) -> float:
        """This rank's weight in the step under way."""
        if self._skips or self.members.shadowing:
            return 0.0
        usual = self.unit if self.weighed else 1.0
        return usual if self._given is None else self._given

    @property
    def gain(self) -> float:
        """By what its gradients are multiplied."""
        return self.own / self.unit

    def begin(self) -> None:
        """A backward begins."""
        self._skips = False

    def agree(self, engine: Engine) -> None:
        """Agree on a unit, in the first backward whose gradients are exchanged."""
        if self.agreed:
            return
        given = UNKNOWN if self._given is None else self._given
        own = NONE if self._skips or self.members.shadowing else given
        known = UNKNOWN if self._known is None else self._known
        row = torch.tensor([own, known], dtype=torch.float64, device="cpu")
        told = engine.ask("weights", AllGather(row))().tolist()
        units = [unit for _, unit in told if unit > 0]
        weights = [round(weight * SCALE) for weight, _ in told if weight > 0]
        # Not where all ranks skip: another backward tells.
        self.agreed = bool(weights) or any(math.isnan(weight) for weight, _ in told)
        self.weighed = bool(weights)
        if weights:
            self.unit = units[0] if units else sum(weights) / (len(weights) * SCALE)

    def settle(self) -> None:
        """A backward begins, and all ranks have heard the sum of the one before."""
        self.unit = self._next_unit

    @property
    def _next_unit(self) -> float:
        """That of the backward to come."""
        if not self.weighed or self.nobody or self.factor == 1:
            return self.unit
        return self.unit + (self._mean - self.unit) / SLOWLY

    def refuse(self) -> None:
        """Raise RuntimeError, on every rank, if only some have given a weight."""
        if self._mixed:
            self._mixed = False
            raise RuntimeError(MIXED)

    def words(self) -> list[int]:
        """This rank's part of a sum over all ranks (hot path)."""
        sent = (self._sent.get(fragment, 0.0) for fragment in self._leaving)
        before = self._sum - min(sent, default=self._sum)
        now = 0.0 if self._closing else self.own
        self._told = told = round((before + now) * SCALE)
        given, plain, absent = self._some_given, self._some_plain, 0
        if self._closing:  # the next message tells of some
            given, plain = self._gave, False
        else:
            self._some_given = self._some_plain = False
        if self.members.shadowing:
            # It counts all the same, if ranks do not weigh: by the steps of others.
            if self.members.counts and not self._closing:
                absent = max(self._steps - round(before), 0)
        elif not self._closing:
            given, plain = given or self._gives, plain or self._is_plain
            self._told_of = True
        digits = [told >> BITS * i & (1 << BITS) - 1 for i in range(DIGITS)]
        return [*digits, given, plain, absent]

    @property
    def _gives(self) -> bool:
        return self._given is not None

    @property
    def _is_plain(self) -> bool:
        return not (self._gives or self._skips)

    def hear(self, told: Sequence[float]) -> None:
        """Take the sum of all ranks' parts."""
        *digits, given, plain, absent = map(int, told)
        total = sum(digit << BITS * i for i, digit in enumerate(digits))
        if not given:
            total += absent * SCALE
        self._mixed |= given > 0 and plain > 0
        alike = not total or (self._closing and not given)
        self.share = 1.0 if alike else self._size * self._told / total
        self.factor = self.unit * self._size / (total / SCALE) if total else 1.0
        self._mean = total / SCALE / self._size

    @property
    def nobody(self) -> bool:
        """Whether no rank counted in the last sum."""
        return not self._mean

    def ended(self) -> None:
        """A backward is over."""
        self._last, self._taken = self.own, True
        self._usual = self._last or self._usual

    def stepped(self, eager: bool) -> None:
        """A step is over, of gradients if it was `eager`; the next has none yet."""
        if not (eager or self.members.shadowing):
            self._sum += self._last
            if self._taken and not self._told_of:
                self._some_given |= self._gives
                self._some_plain |= self._is_plain
        self._told_of = False
        self.left()
        self._last = 1.0
        if self._taken:
            self._given, self._skips, self._taken = None, False, False

    def leave_out(self, steps: int) -> None:
        """Count steps that this rank leaves out of a round as those that it makes.

        So what it has done is not made smaller for being the work of fewer steps.
        """
        self._sum += steps * (self.own or self._usual)

    # - What ranks do in several steps -------------------------------------------------

    def leave(self, leaving: Sequence[int], steps: int, closing: bool = False) -> None:
        """Some fragments are about to leave, with what `steps` steps did.

        When a round is `closing`, the last step is among those that are over.
        """
        self._leaving, self._steps, self._closing = leaving, steps, closing

    def left(self) -> None:
        """They have left."""
        self._sent |= dict.fromkeys(self._leaving, self._sum)
        self._leaving, self._closing, self.share = (), False, 1.0

    # - What is saved ------------------------------------------------------------------

    def go_on(self, unit: float | None) -> None:
        """Go on with the unit of another run, if ranks weigh: they agree anew."""
        self._known, self.unit = unit, 1.0
        self.agreed = self.weighed = False

    @property
    def known(self) -> float | None:
        """The unit, for those that go on."""
        return self._next_unit if self.weighed else self._known

    def renew(self, before: Weights) -> None:
        """Go on where others were the ranks."""
        self._known, self._given, self._gave = before.known, before._given, before._gave

    def since(self, fragments: int) -> dict[str, torch.Tensor]:
        """Of each fragment the sum of weights since it left."""
        sums = {str(f): self._sum - self._sent.get(f, 0.0) for f in range(fragments)}
        return {
            name: torch.tensor(value, dtype=torch.float64, device="cpu")
            for name, value in sums.items()
        }

    def resume(self, since: Mapping[str, torch.Tensor]) -> None:
        """Go on from these sums."""
        self._sum = 0.0
        self._sent = {int(name): -float(value) for name, value in since.items()}
