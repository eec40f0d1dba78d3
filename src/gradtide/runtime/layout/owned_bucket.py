"""A bucket some of whose means are at owners alone, until the optimizer's step.

See [Note: owners] in `collectives.owners`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradtide.collectives.owners import Owners, Span, answers_of
from gradtide.core import ops
from gradtide.core.engine import Engine
from gradtide.core.payload import Collective, hands_over, settled, wire_of
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.optimizer.deferred_step import Owned
from gradtide.wire import codec_of


class OwnedBucket(GradientBucket):
    """Gradients that travel as one; of some the means go to their owners alone.

    That is so where updates are deferred. In a step where they are not, all ranks have
    all means, as of any bucket.
    """

    owned = True

    def __init__(
        self,
        slots: list[Slot],
        flat: Tensor,
        collective: Collective,
        fragment: int,
        owned: Owned,
    ) -> None:
        super().__init__(slots, flat, collective, fragment)
        # Of each slot the rank that owns it; None: it is stepped on every rank.
        self._ranks = [owned.owners.get(slot.param) for slot in slots]
        self._how = owned.dtype, flat.device, owned.wire  # of answers
        self._owners: Owners | None = None

    def launch(self, engine: Engine, hold: bool = False) -> None:
        if not hold:
            self._owners = None
            super().launch(engine)
            return
        payload, group = self.payload, engine.group
        owners = self._owners_among(engine)
        codec = codec_of(wire_of(settled(self.collective)), payload.flat.dtype)
        flow = ops.in_halves(self.collective.reduce(payload, group), group)
        over = hands_over(self.collective, group.size)
        flow = owners.driven(flow, payload.flat, codec)
        self.flight = engine.launch(self.name, flow, hold, hands_over=over)

    def _owners_among(self, engine: Engine) -> Owners:
        if self._owners is None or self._owners.levels is not engine.levels:
            spans = [
                Span(slot.begin, slot.begin + slot.local.numel(), rank)
                for slot, rank in zip(self.slots, self._ranks, strict=True)
            ]
            answers = answers_of(spans, engine.group, *self._how)
            around = engine.group, engine.levels, answers
            self._owners = Owners(spans, self.payload.flat.numel(), *around)
        return self._owners

    def owner(self, slot: Slot) -> int | None:
        """The rank that owns a parameter, if one does."""
        return self._ranks[slot.index]

    def held_mean(self, slot: Slot) -> Tensor:
        """The mean of a parameter that this rank owns, while it is held at the cut."""
        mean = self.views[slot.index]
        return mean if self.factor == 1 else mean.mul_(self.factor)

    def answer(self, slot: Slot, answer: Tensor | None) -> None:
        """Have all ranks told what the step does to a parameter of this rank's."""
        assert self._owners is not None
        self._owners.answers.put(slot.index, answer)

    @property
    def answered(self) -> bool:
        """Whether answers have come, or will come, in the place of means."""
        return self._owners is not None and self._owners.answered

    @answered.setter
    def answered(self, answered: bool) -> None:
        assert self._owners is not None
        self._owners.answered = answered

    def answers(self) -> Iterator[tuple[Slot, Tensor]]:
        """What the step does, of parameters of which that was told."""
        assert self._owners is not None
        for index, answer in self._owners.answers.found():
            slot = self.slots[index]
            yield slot, answer.view(slot.param.shape)

    def delivered(self) -> list[Tensor | None]:
        if self.answered:  # what is owned has had its factor, and is elsewhere
            for slot, view in zip(self.slots, self.views, strict=True):
                if self.factor != 1 and self.owner(slot) is None:
                    view.mul_(self.factor)
            self.factor = 1.0
        means = super().delivered()
        return [
            None if self.answered and self.owner(slot) is not None else mean
            for slot, mean in zip(self.slots, means, strict=True)
        ]
