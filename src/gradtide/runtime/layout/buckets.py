"""A bucket of gradients: what it holds, and what is done to it in a step.

[Note: residual] What was not delivered of a bucket is its residual, and the next
gradients are added to it (error feedback). Where the residual is empty they overwrite
what is there, which may have been handed out as the mean. Only this module says which.

[Note: kept] What was handed out is the program's, as under DDP: it may be kept beyond
the next backward (two tasks' gradients, say), or be given other memory, by `.data`. So
before its memory is written to again, what somebody else still refers to gets a copy of
its own. Views that others have made of it are not known, and see the next gradients.

[Note: untrained] Only what some rank trained in a step moves. Who has no gradient of a
parameter offers its residual all the same, for other ranks may train it, and keeps a
copy. If none did, which the ranks know when the exchange is over, what arrived of it is
dropped, and every rank has back what it offered, bit for bit: so the law holds. From
then on that waits outside of the flat buffer, or it would be selected in every step in
the place of what is trained. It comes back as soon as some rank trains the parameter:
before the exchange on ranks that did, before the next one on others.

[Note: gaps] Between slots, which are padded, are elements of no parameter. Some wires
and transforms leave something there, too. It is dropped: a state has none of it, and
the run that is resumed is to have the bits of the one that went on.

[Note: undone] Where ranks may be lost, an exchange may fail that has taken entries out
of the residual already. So what leaves is kept until it has taken effect here. If the
exchange is undone, all of it is the residual again, gradients that had just arrived
too: they are late, and not lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradtide.collectives.momentum_correction import (
    RESIDUAL,
    moves,
    uses_optimizer_momentum,
    with_momentum,
)
from gradtide.core.engine import Engine, InFlight
from gradtide.core.payload import (
    Collective,
    Payload,
    carried,
    dense_last,
    hands_over,
    layers,
    traits,
)
from gradtide.core.step import Bucket
from gradtide.core.torch_internals import foreach_add_, foreach_copy_, foreach_mul_
from gradtide.runtime.layout.slots import Slot
from gradtide.transport.shards import Spread, local, spread

Parts: TypeAlias = dict[str, Tensor]  # of the residual, and of what is like it
FLAT = ""  # the residual's key among them
LARGE = 1 << 16  # elements: from here on a copy takes longer than a call from Python
_one = [object()]
ALONE = getrefcount(_one[0])  # references to what only a list, or a dict, has


class GradientBucket(Bucket):
    """Gradients that travel as one."""

    keeps = True

    def __init__(
        self,
        slots: list[Slot],
        flat: Tensor,
        collective: Collective,
        fragment: int = 0,
    ) -> None:
        super().__init__("", len(slots))
        self.slots, self.collective, self.fragment = slots, collective, fragment
        self.spread: Spread = spread(slots[0].param)  # of all of them
        self.views = [slot.of(flat) for slot in slots]
        self.gradients: Sequence[Tensor] = self.views  # as last delivered, of the slots
        for i, (slot, view) in enumerate(zip(slots, self.views, strict=True)):
            slot.index, slot.address = i, view.data_ptr()
        self.payload = Payload(flat, self.views)
        self._kind = flat.layout, flat.dtype, flat.device
        self._gaps = _gaps(slots, flat)
        self.residual_empty = True
        self.waiting: dict[
            Slot, Parts
        ] = {}  # of what no rank trains: [Note: untrained]
        self._offered: dict[Slot, Parts] = {}  # copies, of what this rank did not train
        self.momentum_applied = False  # the exchange computes the optimizer's momentum
        self.mean: Tensor | None = None  # as last delivered
        self.gain = 1.0  # by what gradients are multiplied; with 0 they are dropped
        self.factor = 1.0  # by what the mean is still to be multiplied
        self._left: Tensor | None = None  # a copy of what has left: [Note: undone]
        self.open = False  # what has left has yet to take effect
        self.flight: InFlight | None = None
        # Of the last exchange: bytes that were sent, and whether every entry travelled.
        self.exchanged: tuple[int, bool] | None = None

    def rearm(self) -> None:
        super().rearm()
        for slot in self.slots:
            slot.arrived = slot.copied = slot.undefined = False

    # - What is put in -----------------------------------------------------------------

    def copy_in_one(self, slot: Slot) -> None:
        """Add a gradient that has just arrived to the flat buffer, and drop `.grad`.

        It is in the processor's cache still, and the next one gets the same memory: to
        wait for the bucket to be full costs another pass over memory, and fresh pages.
        """
        grad = slot.grad
        if grad is None:
            return
        self._check(slot, grad)
        slot.param.grad = None
        if not self.gain:
            return
        view = self._view(slot, grad).detach()
        if not self.residual_empty or slot.copied:
            view.add_(grad.detach(), alpha=self.gain)
        else:
            if grad.data_ptr() != slot.address:
                _overwrite(view, grad.detach())
            if self.gain != 1:
                view.mul_(self.gain)
        slot.copied = True

    def use_momentum(self, a: float, b: float) -> None:
        """Have the exchange compute u = a u + b g, if it does and a is above 0."""
        own = self.collective = with_momentum(self.collective, a, b)
        self.momentum_applied = a > 0 and moves(own, self.payload.state)

    def copy_in(self) -> None:
        """`copy_in_one` all that has arrived, many small ones at once."""
        views, grads, absent = [], [], []
        here = []  # views in which the gradient is already
        for slot in self.slots:
            if slot.copied:
                continue
            if not self.gain:
                slot.grad = None
            grad = slot.grad
            if slot.arrived and grad is not None:
                self._check(slot, grad)
                slot.param.grad = None
                view = self._view(slot, grad)
                # A gradient that was accumulated in the buffer itself is there already.
                if grad.data_ptr() == slot.address:
                    here.append(view)
                else:
                    views.append(view)
                    grads.append(grad)
                continue
            absent.append(slot)
            slot.undefined = slot.arrived
            if grad is not None and self.mean is not None and lives_in(grad, self.mean):
                grad.data = grad.clone()  # it stays what it is if nobody used it
            view = self._view(slot, grad)
            if self.residual_empty:
                view.zero_()
        self.put(views, grads, self.gain)
        if self.gain != 1 and here:
            foreach_mul_(here, self.gain)
        if absent or self.waiting:
            self.offer(set(absent))

    def _view(self, slot: Slot, grad: Tensor | None) -> Tensor:
        """Its part of the flat buffer, to be written to (hot path)."""
        i = slot.index
        if getrefcount(self.gradients[i]) > ALONE and self.gradients[i] is not grad:
            self.gradients[i].data = self.gradients[i].clone()  # see [Note: kept]
        view = self.views[i]
        if view.data_ptr() != slot.address:
            view = self.views[i] = slot.of(self.payload.flat)
        return view

    def _check(self, slot: Slot, grad: Tensor) -> None:
        """Raise RuntimeError for a gradient that has no place here."""
        if (grad.layout, grad.dtype, grad.device) == self._kind:
            return
        layout, dtype, device = self._kind
        if grad.layout is not layout:
            raise RuntimeError(
                f"the gradient of {slot.name} is {grad.layout}: gradtide averages "
                "dense gradients; build the embedding with sparse=False"
            )
        raise RuntimeError(
            f"{slot.name} was {dtype} on {device} at replicate() and is {grad.dtype} "
            f"on {grad.device} now: cast and move the model before replicate(), or "
            "call sync.remove() on every rank and replicate() again"
        )

    def put(
        self, views: Sequence[Tensor], values: Sequence[Tensor], gain: float = 1.0
    ) -> None:
        """Add values, `gain` times, to the residual in some views."""
        if views and self.residual_empty:
            foreach_copy_(list(views), list(values))
            if gain != 1:
                foreach_mul_(list(views), gain)
        elif views:
            foreach_add_(list(views), list(values), alpha=gain)

    def begin_residual(self) -> None:
        """Have a residual from now on; it is zero where there was none."""
        if self.residual_empty:
            self.payload.flat.zero_()
            self.residual_empty = False

    def drop_residual(self) -> None:
        """Forget what was not delivered, and what an algorithm remembers of it."""
        if not self.residual_empty:
            self.payload.flat.zero_()
            self.residual_empty = True
        self.waiting.clear()
        self._offered.clear()
        self.payload.left = None
        for key in self.per_entry:
            self.payload.state.pop(key, None)

    def restart(self, residuals: Sequence[Tensor | None], zero: bool = False) -> None:
        """Begin anew with residuals of the slots (None: of one that has none).

        The algorithm remembers nothing. All ranks have a residual, or none has: with
        `zero` also one that is zero everywhere.
        """
        self.drop_residual()
        self.payload.state.clear()
        if zero or any(residual is not None for residual in residuals):
            self.begin_residual()
        for slot, view, residual in zip(self.slots, self.views, residuals, strict=True):
            slot.used = True
            if residual is not None:
                view.copy_(residual)
        self._tell_what_is_left()

    def _tell_what_is_left(self) -> None:
        """Have momentum not computed from what is no gradient: see `Payload.left`.

        Who has a residual of its own exchanges knows it, and has it in its state.
        """
        if not self.residual_empty and uses_optimizer_momentum(self.collective):
            self.payload.left = self.payload.flat.clone()

    @property
    def per_entry(self) -> set[str]:
        """The keys of what the algorithm remembers of every entry of the residual."""
        return {k for each in layers(self.collective) for k in traits(each).per_entry}

    # - What may be undone, see [Note: undone] -----------------------------------------

    def keep(self, engine: Engine, copy: bool) -> None:
        """It is about to leave; a `copy` is kept of what is to come back."""
        if not engine.undoes:
            return
        self.open = True
        if not copy:
            self._left = None
        elif self._left is None:
            self._left = self.payload.flat.clone()
        else:
            self._left.copy_(self.payload.flat)

    def settle(self, engine: Engine) -> None:
        """What has left has taken effect."""
        if self.open:
            engine.progress += 1
            self.open = False

    def undo(self, delivered: bool) -> None:
        """Have back what has left and taken no effect here.

        If it was `delivered` elsewhere, it is no more in the residual.
        """
        if not self.open:
            return
        self.open, self._offered = False, {}
        self.residual_empty = delivered or self._left is None
        if self._left is not None and not delivered:
            self.payload.flat.copy_(self._left)

    # - What no rank trains, see [Note: untrained] -------------------------------------

    def offer(self, absent: set[Slot]) -> None:
        """Have back what is trained again; copy what other ranks may have trained.

        `absent` are slots that this rank does not train.
        """
        self._offered = {}
        back = [slot for slot in self.waiting if slot.used or slot not in absent]
        for slot in back:
            parts = self.take_back(slot)
            if slot in absent:
                self._offered[slot] = parts
        for slot in absent - self._offered.keys() - self.waiting.keys():
            if parts := {key: part.clone() for key, part in self._parts(slot)}:
                self._offered[slot] = parts

    def hold(self, slot: Slot, value: Tensor, weight: float) -> bool:
        """Keep a value with the residual of a slot that this rank does not train.

        Returns whether the residual is offered all the same, and the value with it.
        """
        parts = self._offered.get(slot) or self.waiting[slot]
        slot.shaped(parts[FLAT]).add_(value, alpha=weight)
        return slot in self._offered

    def take_back(self, slot: Slot) -> Parts:
        """Have a waiting residual in the bucket again; returns what waited."""
        parts = self.waiting.pop(slot)
        unknown = RESIDUAL in self.per_entry - parts.keys() and FLAT in parts
        if unknown and self.payload.shard is None:
            # What has waited since before momentum is computed here is no gradient.
            parts[RESIDUAL] = parts[FLAT].clone()
        for key, part in self._parts(slot, whole=True):
            if key in parts and len(parts[key]) == len(part):
                part.add_(parts[key])
        return parts

    def set_aside(self, slot: Slot) -> None:
        """Have a slot's residual wait outside of the bucket."""
        parts = self.waiting.setdefault(slot, {})
        for key, part in self._parts(slot):
            parts[key] = parts[key].add_(part) if key in parts else part.clone()
            part.zero_()

    def hold_back(self) -> None:
        """The exchange is over: drop what arrived for slots that no rank trained."""
        offered, self._offered = self._offered, {}
        for slot in self.slots:
            if not slot.used:
                if slot in offered:
                    self.waiting[slot] = offered[slot]
                for _, part in self._parts(slot):
                    part.zero_()

    def residual_of(self, slot: Slot) -> Tensor:
        """A copy of a slot's residual, in the parameter's shape."""
        parts = self.waiting.get(slot, {})
        own = torch.zeros_like(self.views[slot.index])
        if not self.residual_empty:
            own.copy_(self.views[slot.index])
        return own.add_(slot.shaped(parts[FLAT])) if FLAT in parts else own

    def memory(self) -> dict[str, Tensor]:
        """What the algorithm remembers, also of slots that wait."""
        state = dict(self.payload.state)
        for slot, parts in self.waiting.items():
            for key in parts.keys() & state.keys():
                if state[key] is self.payload.state[key]:
                    state[key] = state[key].clone()
                piece = self._piece(slot, state[key])
                if len(piece) == len(parts[key]):
                    piece.add_(parts[key])
        return state

    def _parts(self, slot: Slot, whole: bool = False) -> list[tuple[str, Tensor]]:
        """A slot's part (1-D, a view) of the residual, and of all that is like it.

        With `whole` also where the residual is empty, and gradients are in its place.
        """
        tensors = {} if self.residual_empty and not whole else {FLAT: self.payload.flat}
        state, left = self.payload.state, self.payload.left
        tensors |= {key: state[key] for key in self.per_entry & state.keys()}
        if left is not None and self.payload.shard is None:
            tensors.setdefault(RESIDUAL, left)
        return [(key, self._piece(slot, value)) for key, value in tensors.items()]

    def _piece(self, slot: Slot, value: Tensor) -> Tensor:
        """A slot's part of a tensor like the bucket, or like this rank's part of it."""
        flat, shard, begin = self.payload.flat, self.payload.shard, slot.begin
        if len(value) < len(flat):
            if shard is None:  # not known before the first exchange
                return value[:0]
            begin -= int(shard.flat.storage_offset() - flat.storage_offset())
        return value[max(begin, 0) : max(begin + slot.local.numel(), 0)]

    # - Its exchange -------------------------------------------------------------------

    def launch(self, engine: Engine, hold: bool = False) -> None:
        """Send it on its way; the payload is the flow's until it is finished."""
        flow = self.collective.reduce(self.payload, engine.group)
        over = hands_over(self.collective, engine.group.size)
        self.flight = engine.launch(self.name, flow, hold, hands_over=over)

    def finish(self, engine: Engine) -> None:
        """Wait for the mean, if an exchange is under way."""
        if self.flight is None:
            return
        mean: Tensor = engine.finish(self.flight)
        sent, self.flight = self.flight.total, None
        self.take(mean)
        payload = self.payload
        numel = payload.flat.numel()
        selected = numel if self.residual_empty else payload.num_sent
        dense = engine.dense_bytes(payload.flat.nbytes)
        self.exchanged = sent, selected >= numel
        engine.telemetry.exchange(sent, dense, selected, numel)
        payload.num_sent = 0

    # - What is taken out --------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether the last exchange was of all that there was."""
        own = self.collective
        return traits(own).dense or dense_last(own, self.payload.state)

    def take(self, mean: Tensor) -> None:
        """The mean is here."""
        self.mean, self.payload.left = mean, None
        self.residual_empty = mean.data_ptr() == self.payload.flat.data_ptr()
        self.gradients = self.views
        if not self.residual_empty:
            self.gradients = [slot.of(mean) for slot in self.slots]
            if self._gaps is not None:
                self.payload.flat.index_fill_(0, self._gaps, 0)  # see [Note: gaps]

    def delivered(self) -> list[Tensor | None]:
        """The gradients of slots that some rank trained; None of others."""
        if self.factor != 1 and self.mean is not None:
            self.mean.mul_(self.factor)
            self.factor = 1.0
        self.hold_back()
        return [
            gradient if slot.used else None
            for slot, gradient in zip(self.slots, self.gradients, strict=True)
        ]

    def expose(self) -> None:
        """Make the delivered mean the `.grad` of its parameters."""
        for slot, gradient in zip(self.slots, self.delivered(), strict=True):
            if gradient is not None:
                slot.grad = gradient

    # - Buckets that are cut anew ------------------------------------------------------

    @torch.no_grad()
    def carry(self, before: Sequence[Place], same: bool) -> None:
        """Take over the residuals that other buckets have of these parameters.

        `before` says where each slot's parameter was. If the collective is the `same`,
        what it remembers comes along as far as it is not about a bucket as a whole.
        """
        self.residual_empty = all(place.bucket.residual_empty for place in before)
        self.gradients = [place.bucket.gradients[place.slot.index] for place in before]
        for slot, place in zip(self.slots, before, strict=True):
            old, view = place.bucket, slot.of(self.payload.flat)
            left = place.slot.of(old.payload.flat)
            slot.used = place.slot.used
            moved = left.data_ptr() != view.data_ptr()
            if moved and not old.residual_empty:
                view.copy_(left)
            elif not moved and old.residual_empty and not self.residual_empty:
                # What is there was handed out as the mean, and may be a gradient still.
                grad = slot.grad
                if grad is not None and grad.data_ptr() == view.data_ptr():
                    slot.grad = grad.clone()
                self._view(slot, None).zero_()
        if same:
            self.payload.state.update(self._remembered(before))
        for slot, place in zip(self.slots, before, strict=True):
            waiting = place.bucket.waiting.pop(place.slot, {})
            if parts := {k: v for k, v in waiting.items() if same or k == FLAT}:
                self.waiting[slot] = parts
        self._tell_what_is_left()

    def _remembered(self, before: Sequence[Place]) -> dict[str, Tensor]:
        """What the algorithm can go on with: everything, if it is an old bucket."""
        old = before[0].bucket
        if [id(s.param) for s in self.slots] == [id(s.param) for s in old.slots]:
            return old.payload.state
        olds = [(place.slot, place.bucket.payload) for place in before]
        return carried(self.slots, self.payload.flat, olds)


@dataclass(eq=False)
class Place:
    """Where a parameter's gradient goes; kept when the buckets are cut anew."""

    bucket: GradientBucket
    slot: Slot

    @property
    def shape(self) -> torch.Size:
        """The parameter's, as it was when it was laid out."""
        return self.bucket.views[self.slot.index].shape


def _gaps(slots: Sequence[Slot], flat: Tensor) -> Tensor | None:
    """Where a bucket has elements of no parameter, see [Note: gaps]; None: nowhere."""
    begins = [*[slot.begin for slot in slots[1:]], len(flat)]
    ends = [slot.begin + slot.local.numel() for slot in slots]
    places = [
        i for end, begin in zip(ends, begins, strict=True) for i in range(end, begin)
    ]
    if not places:
        return None
    return torch.tensor(places, dtype=torch.int64, device=flat.device)


def copied_at_once(p: Tensor) -> bool:
    """Whether a gradient is copied in as soon as it is there: where that is quicker.

    A device is asked to copy many at once, when the bucket is full.
    """
    own = local(p)
    return own.is_cpu and own.numel() >= LARGE


def lives_in(tensor: Tensor, flat: Tensor) -> bool:
    """Whether a tensor is in the memory of a flat one."""
    return 0 <= tensor.data_ptr() - flat.data_ptr() < max(flat.nbytes, 1)


def _overwrite(view: Tensor, values: Tensor) -> None:
    """Copy; by numpy on one thread, as it does not read what it overwrites."""
    if view.is_cpu and view.dtype is torch.float32 and torch.get_num_threads() == 1:
        view.numpy()[...] = values.numpy()
        increment_version(view)  # for graphs that have saved it
    else:
        view.copy_(values)
