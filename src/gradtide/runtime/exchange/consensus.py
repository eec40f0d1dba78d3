"""What ranks agreed on last, and what their optimizers' steps have done since.

[Note: gain] Adam divides by the root of the mean square of what it sees. A rank's own
gradient is mostly noise, which in a mean over P ranks is smaller by the root of P: so
much shorter are the steps, and `gain` makes up for it. It is 1 for optimizers that do
not divide; `optimizer.probing` finds out which do. A schedule's own `gain` comes on top
of that: where entries wait long, some of what they should do is not done when training
ends. What optimizers remember of averaged gradients, when a warm-up ends, is too small
for a rank's own by the same token, and is made larger once.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtide.core.devices import unlike
from gradtide.core.outer import OuterSGD
from gradtide.core.payload import dense_last, dense_next
from gradtide.core.torch_internals import foreach_copy_
from gradtide.runtime.exchange import Surroundings
from gradtide.runtime.guards.checksum import compare
from gradtide.runtime.layout.broadcast import digest
from gradtide.runtime.layout.buckets import GradientBucket, lives_in
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.optimizer.probing import Traits, probe
from gradtide.scheme import Scheme
from gradtide.transport.shards import local

OUTSIDE = (
    "it was changed outside step() by what each rank has alone: by hand, by a state "
    "that was loaded, or by the optimizer, as some do; or ranks' first steps had other "
    "hyper-parameters. Where steps are exchanged, only step() may; make the change on "
    "every rank, or use a schedule that exchanges gradients, such as 'wfbp'"
)


class Consensus:
    """Parameters as the last exchange left them, from where what is done counts.

    It outlives the scheme: the exchanges of steps and of rounds go on from it.
    """

    def __init__(self, around: Surroundings, averaged: bool) -> None:
        """`averaged`: the optimizer has stepped from averaged gradients before."""
        self.averaged = averaged
        self._engine, self._placement = around.engine, around.placement
        self._optimizer = around.optimizer
        self._traits = probe(around.optimizer)
        self.begun = False  # steps are exchanged, and no gradients any more
        self.to_widen = False  # what the optimizer remembers, see [Note: gain]
        self.shared: dict[Tensor, Tensor] = {}
        # What was done to parameters when they left, where that is asked for later.
        self.moved: dict[Tensor, Tensor] = {}
        self.velocity: dict[Tensor, Tensor] = {}  # the outer optimizer's momentum
        # Where ranks never have parameters quite alike, in rounds: those that this
        # rank's steps have changed since they left last.
        self.changed: set[Tensor] = set()
        # Whether some rank trains a parameter, in the exchange that is to come: see
        # [Note: untrained] in `buckets`. Without a word of the ranks, all are trained.
        self._trained: dict[Tensor, bool] = {}

    def adopt(self, scheme: Scheme) -> None:
        """Go on by a scheme, when nothing is under way."""
        self._schedule, self._outer = scheme.schedule, scheme.outer or OuterSGD()
        # How many times the squares of a rank's gradients are those of their mean.
        self._noise = self._engine.group.size if self._schedule.noise else 1
        if not self._outer.momentum:
            self.velocity = {}

    def note_averaged(self) -> None:
        """The optimizer has stepped from averaged gradients before."""
        self.averaged = True
        self.to_widen |= self.begun

    @property
    def is_due(self) -> bool:
        """Whether a warm-up is over, so that steps can be exchanged."""
        first = self._placement.buckets[0]  # the others are as far
        return not dense_next(first.collective, first.payload.state)

    def begin(self) -> None:
        """From now on steps are exchanged, and buckets hold none of the gradients."""
        for bucket in self._placement.buckets:
            bucket.waiting.clear()  # gradients are no steps
        self.resume()
        self.to_widen |= self.averaged

    def resume(self) -> None:
        """Buckets have residuals of steps, and no gradient may live in them."""
        first, self.begun = self._placement.buckets[0], True
        self.to_widen = dense_last(first.collective, first.payload.state)
        for place in self._placement.places.values():
            grad = place.slot.grad
            if grad is not None and lives_in(grad, place.bucket.payload.flat):
                place.slot.grad = grad.clone()

    def widen_once(self) -> None:
        """Have the optimizer expect a rank's own gradients, see [Note: gain]."""
        due, self.to_widen = self.to_widen, False
        if not due:
            return
        for p in self._placement.places:
            known, memory = self.known(p)
            if known.divides:
                for name in memory.keys() & set(known.squares):
                    memory[name].mul_(self._noise)

    # - What is shared -----------------------------------------------------------------

    def remember(self) -> None:
        """Parameters are as the next step, or round, is to find them."""
        for slot in self._placement.slots:
            self.shared.setdefault(slot.param, torch.empty_like(slot.local))
        own = [local(p) for p in self.shared]
        foreach_copy_(list(self.shared.values()), own)

    def moved_outside(self) -> bool | Tensor:
        """Whether parameters are not what the last exchange left.

        They are remembered, so that the next call compares with what they are now.
        """
        known = [(local(p), x) for p, x in self.shared.items()]
        moved = unlike(known) if known else True
        if moved is not False:  # also where only the device knows
            self.remember()
        return moved

    def is_apart(self, slot: Slot) -> bool:
        """Whether this rank has a parameter otherwise than what is shared of it."""
        return not torch.equal(slot.local, self.shared[slot.param])

    def compare(
        self, moment: str, causes: str = OUTSIDE, some: Container[Tensor] | None = None
    ) -> None:
        """Raise RuntimeError, on every rank, where parameters, or some, differ."""
        names: dict[Tensor, str] = {s.param: s.name for s in self._placement.slots}
        known = self.shared.items()
        own = {names[p]: digest(x) for p, x in known if some is None or p in some}
        shards = self._placement.shards
        compare(self._engine.transport, own, f" {moment}", causes, shards)

    # - What is saved ------------------------------------------------------------------

    def by_name(self, found: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """Some of parameters' tensors, by the names of these."""
        slots = self._placement.slots
        return {slot.name: found[slot.param] for slot in slots if slot.param in found}

    def of_names(self, saved: Mapping[str, Tensor]) -> dict[Tensor, Tensor]:
        """Tensors in the parameters' memory formats, with what was saved by name."""
        return {
            slot.param: torch.empty_like(slot.local).copy_(saved[slot.name])
            for slot in self._placement.slots
            if slot.name in saved
        }

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """Raise ValueError for what was saved of another model's parameters."""
        shapes = {slot.name: slot.local.shape for slot in self._placement.slots}
        for name, value in saved.items():
            if name not in shapes or value.shape != shapes[name]:
                raise ValueError(
                    f"the state's parameter {name} has shape {tuple(value.shape)}, the "
                    f"model's {tuple(shapes.get(name, ()))}: build the model that was "
                    "saved"
                )

    # - An exchange --------------------------------------------------------------------

    def hear(self, slots: Iterable[Slot], counts: Iterable[int]) -> None:
        """Learn how many ranks train what, in the exchange that is to come."""
        pairs = zip(slots, counts, strict=True)
        self._trained = {slot.param: count > 0 for slot, count in pairs}

    def left(self) -> None:
        """All that was to leave has left."""
        self._trained = {}

    def begin_offer(self, bucket: GradientBucket) -> None:
        """Have a bucket hold the residual of what some rank trains."""
        bucket.begin_residual()
        for slot in bucket.slots:
            slot.used = self._trained.get(slot.param, True)
            if not slot.used:
                bucket.set_aside(slot)
            elif slot in bucket.waiting:
                bucket.take_back(slot)
        self.fade(bucket)

    def fade(self, bucket: GradientBucket) -> None:
        """Leave as much of a bucket's residual as is to count."""
        if self._schedule.decay != 1:
            bucket.payload.flat.mul_(self._schedule.decay)

    def done(self, slot: Slot, keep: bool) -> Tensor:
        """What was done to a parameter since; `keep` it, to be asked for in `moved`."""
        p, out = slot.param, None
        if keep:
            out = self.moved.setdefault(p, torch.empty_like(slot.local))
        return torch.sub(slot.local, self.shared[p], out=out)

    def move(self, bucket: GradientBucket, slots: Sequence[Slot]) -> None:
        """Have the outer optimizer move what is shared of some slots of a bucket."""
        shared = [self.shared[slot.param] for slot in slots]
        means = [bucket.gradients[slot.index] for slot in slots]
        self._outer.move(shared, means, self._momentum(slots))

    def _momentum(self, slots: Sequence[Slot]) -> list[Tensor]:
        """The outer optimizer's, of some parameters; empty if it has none."""
        if not self._outer.momentum:
            return []
        for slot in slots:
            if slot.param not in self.velocity:
                self.velocity[slot.param] = torch.zeros_like(slot.local)
        return [self.velocity[slot.param] for slot in slots]

    # - The rank's own optimizer -------------------------------------------------------

    def known(self, p: Tensor) -> tuple[Traits, dict[str, Any]]:
        """How the optimizer steps for a parameter, and what it remembers of it."""
        return self._traits.get(p, Traits()), self._optimizer.state.get(p, {})

    def weight(self, p: Tensor) -> float:
        """How many times a step counts, see [Note: gain]."""
        noise = self._noise if self.known(p)[0].divides else 1
        return self._schedule.gain * math.sqrt(noise)
