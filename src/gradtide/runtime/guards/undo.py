"""Steps that a program undoes: parameters are loaded in the middle of a training.

That happens after a range test of learning rates, or where training goes on from the
best parameters so far. What was not delivered by then belongs to the steps that are
undone, and may be large: it would be added to parameters that it was not meant for. So
the residual is dropped. It stays where the parameters come to be what they were: many
programs load an average of them, evaluate it, and load their own back.
"""

from __future__ import annotations

from torch import Tensor

from gradtide.runtime.guards.checksum import checksum
from gradtide.runtime.layout.placement import Placement


class UndoGuard:
    """Drops the residual of steps that are undone. All of it is local.

    That does no harm to what ranks have in common: a residual is each rank's own.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._before: Tensor | None = None  # a checksum of what was there at the load
        self._loaded = False  # the residual is one that was loaded, and not used yet

    def keep(self) -> None:
        """A residual was loaded: it belongs to parameters that are loaded before it.

        Or to those that are loaded behind it, before anything is trained.
        """
        self._before, self._loaded = None, True

    def loading(self) -> None:
        """Parameters are about to be loaded into the model."""
        buckets = self._placement.buckets
        left = any(b.waiting or not b.residual_empty for b in buckets)
        if left and not self._loaded and self._before is None:
            self._before = self._checksum()

    def resolve(self) -> None:
        """A backward has begun, and nothing is in the buckets but the residual."""
        before, self._before, self._loaded = self._before, None, False
        if before is None or bool((self._checksum() == before).all()):
            return
        for bucket in self._placement.buckets:
            bucket.drop_residual()

    def _checksum(self) -> Tensor:
        slots = sorted(self._placement.slots, key=lambda slot: slot.name)
        return checksum(slot.local for slot in slots)
