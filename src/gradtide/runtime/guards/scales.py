"""Whether the ranks' GradScalers multiply the loss by the same number.

A mean of gradients that were multiplied by unlike numbers is no multiple of the right
mean, and what each rank divides it by is another number: ranks part. It happens where a
rank has loaded a GradScaler's state of its own, or has updated its GradScaler less
often than others. So the small message that ends a backward tells of the numbers.

No one tells of a GradScaler but `replicate(grad_scaler=)`. It is found when it has an
optimizer step, as the one whose method `step` is under way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from weakref import ref

import torch
from torch import Tensor
from torch.amp import GradScaler

from gradtide.core.engine import Engine

DEPTH = 24  # calls between a GradScaler's step and a hook of the optimizer
PRIME = 1021  # of which powers of two have different remainders


class Scales:
    """This rank's GradScaler, and what all ranks have told of theirs."""

    def __init__(self, engine: Engine, given: GradScaler | None) -> None:
        self._engine, self._found = engine, None if given is None else ref(given)
        self.given: Callable[[], float] | None = None  # tells a scale
        if given is not None:
            self.given = given.get_scale
        self._differ = False

    @property
    def scaler(self) -> GradScaler | None:
        """The GradScaler, if one is known."""
        return None if self._found is None else self._found()

    def look(self) -> None:
        """An optimizer's step begins: find the GradScaler that makes it."""
        frame, step = sys._getframe(1), GradScaler.step.__code__
        for _ in range(DEPTH):
            if frame.f_code is step:
                self._found = ref(frame.f_locals["self"])
                return
            if frame.f_back is None:
                return
            frame = frame.f_back

    def words(self, abstain: bool) -> Callable[[], list[int]]:
        """This rank's part of an all-reduce, to be called when that is made.

        It is the number of ranks that have a scale; of these, the sum of a number that
        follows from it, and of its square: all are equal if these sums say so.
        """
        scaler = None if abstain else self.scaler
        scale: Tensor | None = getattr(scaler, "_scale", None)
        if scale is None:
            return lambda: [0, 0, 0]
        kept = scale.detach().clone()  # it may change before the message is made

        def words() -> list[int]:
            bits = int(kept.float().cpu().view(torch.int32)) % PRIME
            return [1, bits, bits * bits]

        return words

    def update(self, words: Iterator[int]) -> None:
        """Take the sum of all ranks' parts from the answer."""
        known, total, squares = int(next(words)), int(next(words)), int(next(words))
        self._differ = known * squares != total * total

    def refuse(self) -> None:
        """Raise RuntimeError, on every rank, if the ranks' scales turned out unlike."""
        if not self._differ:
            return
        self._differ = False
        scaler = self.scaler
        told = self._engine.transport.gather_objects(scaler and scaler.get_scale())
        scales = ", ".join(f"rank {r} has {s:g}" for r, s in enumerate(told) if s)
        raise RuntimeError(
            f"the scale of the GradScaler differs between ranks: {scales}. Gradients "
            "that were multiplied by unlike numbers have no mean: load the same state "
            "into it on every rank (scaler.load_state_dict), and call its update() "
            "equally often, or inside `with sync.join():`"
        )
