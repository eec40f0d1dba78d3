"""A bucket of gradients: what it holds, and what is done to it in a step.

[Note: clean] A bucket is clean if nothing is left behind in it: then the next gradients
overwrite what is there, which may have been handed out as the mean, and otherwise are
added to it. Only this module says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradtide.bucket import Collective, Payload
from gradtide.engine import Engine, Flight
from gradtide.step import Bucket

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
LARGE = 1 << 16  # elements: from here on a copy takes longer than a call from Python


@dataclass(eq=False)
class Slot:
    """A parameter's place in the flat buffer of its bucket."""

    name: str
    param: nn.Parameter
    position: int  # in the order in which gradients get ready
    begin: int
    arrived: bool = False  # its gradient, in this backward
    taken: bool = False  # in already: not left to the bucket's take_in()
    used: bool = True  # by some rank, in the last exchange
    wanted: bool = False  # its gradient was still there at the deferred step

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor, in the parameter's memory format."""
        p = self.param
        piece = flat[self.begin : self.begin + p.numel()]
        last = FORMATS.get(p.dim())
        if last is not None and p.is_contiguous(memory_format=last):
            return piece.as_strided(p.shape, p.stride(), piece.storage_offset())
        return piece.view(p.shape)


class GradientBucket(Bucket):
    """Gradients that travel as one."""

    keeps = True

    def __init__(self, slots: list[Slot], flat: Tensor, collective: Collective) -> None:
        super().__init__("", len(slots))
        self.slots, self.collective = slots, collective
        self.load = Payload(flat, [slot.of(flat) for slot in slots])
        self.clean = True
        self.late = False  # something had been left when the exchange began
        self.moved = False  # the exchange computes the optimizer's momentum
        self.mean: Tensor | None = None  # as last delivered
        self.flight: Flight | None = None

    @property
    def views(self) -> Sequence[Tensor]:
        return self.load.parts

    def rearm(self) -> None:
        super().rearm()
        for slot in self.slots:
            slot.arrived = slot.taken = False

    # - What is put in -----------------------------------------------------------------

    @torch.no_grad()
    def take(self, slot: Slot) -> None:
        """Add a gradient that has just arrived to the flat buffer, and drop `.grad`.

        It is in the processor's cache still, and the next one gets the same memory: to
        wait for the bucket to be full costs another pass over memory, and fresh pages.
        """
        grad, view = slot.param.grad, slot.of(self.load.flat)
        if grad is None:
            return
        slot.param.grad = None
        if grad.data_ptr() != view.data_ptr():
            fresh = self.clean and not slot.taken
            (view.copy_ if fresh else view.add_)(_dense(slot, grad))
        slot.taken = True

    def take_in(self) -> None:
        """`take` all that has arrived, many small ones at once."""
        self.late = not self.clean
        views, grads = [], []
        for slot, view in zip(self.slots, self.views, strict=True):
            if slot.taken:
                continue
            grad = slot.param.grad
            if slot.arrived and grad is not None:
                slot.param.grad = None
                # A gradient that was accumulated in the buffer itself is there already.
                if grad.data_ptr() != view.data_ptr():
                    views.append(view)
                    grads.append(_dense(slot, grad))
            elif self.clean:
                view.zero_()
        self.put(views, grads)

    def put(self, views: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Add values to what was left behind in some views."""
        if views:
            add = torch._foreach_copy_ if self.clean else torch._foreach_add_
            add(list(views), list(values))

    def owe(self) -> None:
        """Something will be left behind here from now on; zero, where nothing was."""
        if self.clean:
            self.load.flat.zero_()
            self.clean = False

    def reset(self) -> None:
        """Forget what was left behind, and what the algorithm remembers."""
        self.load.flat.zero_()
        self.load.state.clear()
        self.clean = True

    # - Its exchange -------------------------------------------------------------------

    def launch(self, engine: Engine, hold: bool = False) -> None:
        """Send it on its way; the payload is the flow's until it is finished."""
        flow = self.collective.reduce(self.load, engine.group)
        self.flight = engine.launch(self.name, flow, hold)

    def finish(self, engine: Engine) -> None:
        """Wait for the mean, if an exchange is under way."""
        if self.flight is None:
            return
        mean: Tensor = engine.finish(self.flight)
        self.flight, self.mean = None, mean
        load = self.load
        self.clean = mean.data_ptr() == load.flat.data_ptr()
        numel = load.flat.numel()
        engine.telemetry.select(numel if self.clean else load.taken, numel)
        load.taken = 0

    def drop(self, engine: Engine) -> None:
        """Give up a held exchange: what its memory held as the mean is gone."""
        assert self.flight is not None
        kept, self.flight = engine.drop(self.flight).untyped_storage(), None
        self.clean = kept.data_ptr() == self.load.flat.untyped_storage().data_ptr()

    # - What is taken out --------------------------------------------------------------

    def gradients(self) -> Sequence[Tensor]:
        """The delivered mean in the shapes of the slots."""
        assert self.mean is not None
        return self.views if self.clean else [slot.of(self.mean) for slot in self.slots]

    def delivered(self) -> list[tuple[Slot, Tensor]]:
        """The slots with a gradient: those that some rank used now, or earlier.

        What was left behind of a parameter may arrive when nobody uses it any more.
        """
        return [
            (slot, gradient)
            for slot, gradient in zip(self.slots, self.gradients(), strict=True)
            if slot.used or (self.late and bool(gradient.any()))
        ]

    def expose(self) -> None:
        """Make the delivered mean the `.grad` of its parameters."""
        for slot, gradient in self.delivered():
            slot.param.grad = gradient

    # - Buckets that are cut anew ------------------------------------------------------

    @torch.no_grad()
    def carry(self, before: Sequence[Place], same: bool) -> None:
        """Take over what other buckets left behind of these parameters.

        `before` says where each slot's parameter was. If the collective is the `same`,
        what it remembers comes along as far as it is not about a bucket as a whole.
        """
        self.clean = all(place.bucket.clean for place in before)
        for slot, place in zip(self.slots, before, strict=True):
            old, view = place.bucket, slot.of(self.load.flat)
            left = place.slot.of(old.load.flat)
            moved = left.data_ptr() != view.data_ptr()
            if moved and not old.clean:
                view.copy_(left)
            elif not moved and old.clean and not self.clean:
                # What is there was handed out as the mean, and may be a gradient still.
                grad = slot.param.grad
                if grad is not None and grad.data_ptr() == view.data_ptr():
                    slot.param.grad = grad.clone()
                view.zero_()
        if same:
            self.load.state.update(self._remembered(before))

    def _remembered(self, before: Sequence[Place]) -> dict[str, Tensor]:
        """What the algorithm can go on with.

        Everything, if the bucket is an old one. Otherwise numbers of steps, if those of
        all the old buckets are equal, and what has an entry for every element (a
        velocity). Thresholds, boundaries and factors are about a bucket as a whole, and
        are learnt anew, as in a first step.
        """
        olds = list(dict.fromkeys(place.bucket for place in before))
        states = [old.load.state for old in olds]
        if [id(s.param) for s in self.slots] == [id(s.param) for s in olds[0].slots]:
            return states[0]
        kept: dict[str, Tensor] = {}
        for key in {key: None for state in states for key in state}:
            values = [state.get(key) for state in states]
            if all(_is_count(value) for value in values):
                numbers = {int(value) for value in values if value is not None}
                if len(numbers) == 1:
                    kept[key] = torch.tensor(numbers.pop())
            elif all(
                value is None or _is_like(value, old.load.flat)
                for value, old in zip(values, olds, strict=True)
            ):
                kept[key] = torch.zeros_like(self.load.flat)
                for slot, place in zip(self.slots, before, strict=True):
                    value = place.bucket.load.state.get(key)
                    if value is not None:
                        slot.of(kept[key]).copy_(place.slot.of(value))
        return kept


@dataclass(eq=False)
class Place:
    """Where a parameter's gradient goes; kept when the buckets are cut anew."""

    bucket: GradientBucket
    slot: Slot


def _is_count(value: Tensor | None) -> bool:
    return value is not None and value.dtype == torch.int64 and not value.dim()


def _is_like(value: Tensor, flat: Tensor) -> bool:
    return value.shape == flat.shape and value.dtype == flat.dtype


def _dense(slot: Slot, grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {slot.name} is {grad.layout}: gradtide averages dense "
            "gradients; build the embedding with sparse=False"
        )
    return grad
