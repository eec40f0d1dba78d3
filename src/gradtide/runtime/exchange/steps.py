"""The optimizer's own steps in the place of gradients.

[Note: local steps] Every rank steps from its own gradients, at parameters that all
ranks have alike. What then travels, and stays in part as a residual, is what the step
did to the parameters:

    step():  own += gain * what the optimizer changed;  mean, own = exchange(own)
             parameters += mean

Gradients that arrive late, many at once, are divided by what Adam remembers of other
steps; steps that arrive late are as long as they were meant to be. That the residual is
a part of the step is from Qsparse-local-SGD (Basu et al., NeurIPS 2019).

[Note: rounds] In rounds of several steps (`Schedule.every`) ranks have parameters alike
only as an exchange has left them (`shared`). What travels is what all steps of a round
did; its mean moves `shared` by the outer optimizer, and the parameters follow. If it
comes late, a rank's steps since it left are kept. Nothing is compared or looked for in
between, and the notes below, but for the first, are for rounds of one step (LOCAL).

[Note: gain] Adam divides by the root of the mean square of what it sees. A rank's own
gradient is mostly noise, which in a mean over P ranks is smaller by the root of P: so
much shorter are the steps, and `gain` makes up for it. It is 1 for optimizers that do
not divide; `optimizer.probing` finds out which do. A schedule's own `gain` comes
on top of that: where entries wait long, some of what they should do is not done when
training ends. What optimizers remember of averaged gradients, when a warm-up ends, is
too small for a rank's own by the same token, and is made larger once.

[Note: weighed] With Adam a step is as long for a parameter that hardly matters. The
selection scores are therefore the square of the step times the optimizer's mean of
gradients: half way between the longest steps and those that should lower the loss most.
A residual that the mean of gradients has come to oppose counts for less (`against`): by
then it is mostly noise.

[Note: ahead] Momentum spreads what a gradient does over steps to come, 9 times as much
with a momentum of .9 as the first step does. Entries that were sent are then soon the
largest again, with more of the same: half of what travelled, in a trial of `exdyna`. So
a part of it (`ahead`) is sent with the step, and owed: the steps to come make it good.
That also makes up for delay, which is what is wrong with entries that wait.

[Note: alike] Parameters must be alike when a step begins. What the user changes in
between is, but an optimizer may change them outside `step()` by what each rank has
alone. So every rank looks whether they are what the last exchange left, and if one
finds other values, all compare: that travels while the optimizer steps. Gradients may
be taken elsewhere, as by SAM, but where a step() never comes, parameters are compared
after the third backward.

[Note: shared] What ranks agreed on last is all that they have alike in a round, and no
exchange of what each has done ever mends it. So before a fragment leaves its checksum
travels with the flags, which costs a reading pass over the fragment, and no message.
A rank abstains that has yet to apply the fragment's last exchange: it skipped the step
at which that was due.

In the dense steps of a warm-up gradients are exchanged, as by any schedule: the mean of
steps costs as much to send, and learns worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from gradtide.core.devices import unlike
from gradtide.core.engine import Engine
from gradtide.core.ops import AllReduce
from gradtide.core.outer import OuterSGD
from gradtide.core.payload import traits
from gradtide.core.step import Stage
from gradtide.core.torch_internals import (
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_sub_,
)
from gradtide.runtime.guards.checksum import checksum, compare, differ, words_of
from gradtide.runtime.guards.nonfinite import NonFiniteGuard, is_finite
from gradtide.runtime.layout.broadcast import digest
from gradtide.runtime.layout.buckets import GradientBucket, Slot, lives_in
from gradtide.runtime.layout.buffers import SharedBuffers
from gradtide.runtime.layout.placement import Placement
from gradtide.runtime.optimizer.probing import Traits, probe
from gradtide.scheme import Scheme
from gradtide.transport.shards import local

# Backward passes to a step, where they leave from other parameters: SAM's.
PASSES = 2
OUTSIDE = (
    "it was changed outside step() by what each rank has alone, as some optimizers do. "
    "Where steps are exchanged, only step() may; use a schedule that exchanges "
    "gradients, such as 'wfbp'"
)
APART = (
    "it is what ranks agreed on last in rounds, which only their exchanges change. "
    "Ranks have gone on from states of different runs or moments, or the memory of one "
    "was changed: load what was saved at one moment, on every rank"
)
# By what steps count where the mean of gradients is zero: last, but they do travel.
FAINT = 1e-30


class LocalSteps:
    """The exchange of steps; its methods are called under `torch.no_grad`."""

    def __init__(
        self,
        engine: Engine,
        placement: Placement,
        guard: NonFiniteGuard,
        optimizer: Optimizer,
        scheme: Scheme,
        buffers: SharedBuffers,
    ) -> None:
        self._engine, self._placement = engine, placement
        self._guard, self._optimizer = guard, optimizer
        self._buffers = buffers
        self._traits = probe(optimizer)
        self.on = False  # steps are exchanged; not in the dense steps of a warm-up
        self.closing = False  # a round ends before its time, on all ranks
        # Parameters as the last exchange left them, from where what is done counts; and
        # what was done to them when they left, where that is asked for afterwards.
        self.shared: dict[Tensor, Tensor] = {}
        self.moved: dict[Tensor, Tensor] = {}
        self.velocity: dict[Tensor, Tensor] = {}  # the outer optimizer's momentum
        self._moved_on: Callable[[], Any] | None = None  # how many ranks, between steps
        # Whether some rank trains a parameter, in the exchange that is to come: see
        # [Note: untrained] in `buckets`. Without a word of the ranks, all are trained.
        self._trained: dict[Tensor, bool] = {}
        # Where ranks never have parameters quite alike: those that this rank's steps
        # have changed since they left last.
        self.changed: set[Tensor] = set()
        self._passes = 0  # backward passes since the last step
        self._ahead: Mapping[Tensor, float] = {}  # see [Note: ahead]
        self.adopt(scheme)

    def adopt(self, scheme: Scheme) -> None:
        """Go on with another scheme, when nothing is under way."""
        self._schedule, self._outer = scheme.schedule, scheme.outer or OuterSGD()
        # How many times the squares of a rank's gradients are those of their mean.
        self._noise = self._engine.group.size if self._schedule.noise else 1
        if not self._outer.momentum:
            self.velocity = {}
        self.on = self.on and self.rounds
        if not self.rounds:
            self.decide()

    @property
    def rounds(self) -> bool:
        """Whether ranks differ between exchanges."""
        return self._schedule.rounds

    def decide(self) -> None:
        """A backward begins: is it for steps or for gradients?

        Where ranks differ between exchanges, they begin to with equal parameters.
        """
        before = self.on
        if before and self.rounds:  # for good: a flow under way may be counting
            return
        first = self._placement.buckets[0]  # the others are as far
        self.on = not traits(first.collective).dense_next(first.payload.state)
        if before or not self.on:
            return
        for bucket in self._placement.buckets:
            bucket.waiting.clear()  # gradients are no steps
        # No gradient may live in a bucket any more: the residuals of steps do.
        for place in self._placement.places.values():
            grad = place.slot.grad
            if grad is not None and lives_in(grad, place.bucket.payload.flat):
                place.slot.grad = grad.clone()
        if self.rounds:
            self.remember()
            self._widen_once()
            self._compare("as a round begins")

    # - A step -------------------------------------------------------------------------

    def check(self, leaving: int | None) -> None:
        """After backward: all ranks learn of gradients that are not finite.

        A rank that has none marks one of its own: a GradScaler skips everywhere then.
        In a round's last step, what its steps have made of parameters counts, too; and
        what ranks agreed on last, of the fragment that is leaving, has to be alike.
        """
        grads = {
            slot.name: grad
            for slot in self._placement.slots
            if (grad := slot.grad) is not None and grad.numel()
        }
        culprit = not_finite(grads)
        rank, size = self._engine.group
        self._passes += 1
        flags = [0] * size
        flags[rank] = int(culprit is not None)
        self._guard.update(self._agree(flags, leaving), culprit)
        if self._guard.ranks and culprit is None:
            for grad in list(grads.values())[:1]:
                grad[(0,) * grad.dim()] = math.nan

    def _astray(self) -> str | None:
        """What ends a run before steps are exchanged; an empty text: look for it."""
        if self.rounds:
            named = {slot.name: slot.local for slot in self._placement.slots}
            return not_finite({name: p for name, p in named.items() if p.numel()})
        return "" if self._passes > PASSES and bool(self._moved_outside()) else None

    def _refuse(self, astray: str | None) -> None:
        """Raise RuntimeError, on every rank, for what some rank has found."""
        if not self.rounds:
            self._compare(f"after {self._passes} backward passes without step()")
            return
        found = enumerate(self._engine.transport.gather_objects(astray))
        named = ((rank, name) for rank, name in found if name is not None)
        rank, name = next(named, ("of another shard", "a parameter"))
        raise RuntimeError(
            f"{name} has become infinite or NaN on rank {rank} in this round, before "
            "anything of it was sent: load a checkpoint, and lower the learning rate, "
            "clip, or train with torch.amp.GradScaler, which skips such steps"
        )

    def check_round(self) -> None:
        """Before a round ends early: RuntimeError, on every rank, for what is NaN.

        Or for what ranks should have alike, and have not.
        """
        self._agree([], None, closing=True)

    def _agree(
        self, flags: Sequence[int], leaving: int | None, closing: bool = False
    ) -> list[int]:
        """Add up the ranks' flags.

        Others go with them: whether buffers are others, whether anything has gone
        astray, what is trained, and a checksum of what is leaving. In a round what is
        trained is what its steps have changed, or the one to come will; when it is
        `closing`, whatever may differ between ranks.
        """
        astray, leave = self._astray(), self._leaving(leaving)
        more = [self._buffers.changed(), astray is not None]
        slots = [*self._placement.slots] if self.rounds else []
        trained = [s.arrived or self._is_changed(s, closing) for s in slots]
        own = [*flags, *more, *trained, *self._words(leave)]
        message = AllReduce(torch.tensor(own, dtype=torch.int32, device="cpu"))
        told = iter(self._engine.ask("finite", message)().tolist())
        counts = [*islice(told, len(flags))]
        changed, gone = islice(told, 2)
        self._note(slots, [*islice(told, len(slots))])
        if self._placement.shards.anywhere(gone > 0):
            self._refuse(astray)
        self._buffers.note(changed > 0)
        if differ([*told]):
            alike = {slot.param for bucket in leave for slot in bucket.slots}
            self._compare("as a fragment leaves", APART, alike)
        return counts

    def _leaving(self, fragment: int | None) -> list[GradientBucket]:
        """Of what has to be alike: the buckets of a fragment, or all of a round."""
        if not self.rounds:
            return []
        buckets = self._placement.buckets
        return [b for b in buckets if fragment in (None, b.fragment)]

    def _words(self, leave: Sequence[GradientBucket]) -> list[int]:
        """A checksum of what ranks agreed on last, see [Note: shared]."""
        group = self._engine.group
        if not leave or group.size == 1:
            return []
        late = any(bucket.stage is Stage.SENT for bucket in leave)
        held = (self.shared[slot.param] for bucket in leave for slot in bucket.slots)
        return words_of(None if late else checksum(held), group)

    def _is_changed(self, slot: Slot, closing: bool) -> bool:
        """Whether this rank's steps have changed a parameter, or are about to."""
        if slot.grad is not None and bool(slot.grad.any()):
            return True
        if self._schedule.mix is None or closing:
            return self._is_apart(slot)
        return slot.param in self.changed

    def _note(self, slots: Sequence[Slot], counts: Sequence[int]) -> None:
        """Learn how many ranks train what, in the exchange that is to come."""
        pairs = zip(slots, counts, strict=True)
        self._trained = {slot.param: count > 0 for slot, count in pairs}

    def stepping(self) -> None:
        """The optimizer's step begins."""
        self._passes = 0
        slots = [*self._placement.slots]
        if self.rounds:
            if self._schedule.mix is not None:
                self.changed |= {s.param for s in slots if s.grad is not None}
            return
        self._widen_once()
        # The optimizer steps for what has a gradient.
        trained = [slot.grad is not None for slot in slots]
        moved = self._moved_outside()

        def message() -> AllReduce:
            flags = [bool(moved), *trained]  # here the host waits for a device
            return AllReduce(torch.tensor(flags, dtype=torch.int32, device="cpu"))

        self._moved_on = self._engine.ask("alike", message)
        self._ahead = self._look_ahead()

    def _widen_once(self) -> None:
        """Have the optimizer expect a rank's own gradients, see [Note: gain]."""
        first = self._placement.buckets[0]
        if not traits(first.collective).dense_last(first.payload.state):
            return
        for p in self._placement.places:
            known, memory = self._known(p)
            if known.divides:
                for name in memory.keys() & set(known.squares):
                    memory[name].mul_(self._noise)

    def _moved_outside(self) -> bool | Tensor:
        """Whether parameters are not what the last exchange left, see [Note: alike].

        They are remembered, so that the next call compares with what they are now.
        """
        known = [(local(p), x) for p, x in self.shared.items()]
        moved = unlike(known) if known else True
        if moved is not False:  # also where only the device knows
            self.remember()
        return moved

    def remember(self) -> None:
        """Parameters are as the next step, or round, is to find them."""
        for slot in self._placement.slots:
            self.shared.setdefault(slot.param, torch.empty_like(slot.local))
        own = [local(p) for p in self.shared]
        foreach_copy_(list(self.shared.values()), own)

    def stepped(self) -> None:
        """The optimizer has made its step; RuntimeError if ranks began it unlike."""
        moved_on, self._moved_on = self._moved_on, None
        if moved_on is None:
            return
        moved, *trained = moved_on().tolist()
        self._note([*self._placement.slots], trained)
        if self._placement.shards.anywhere(moved):
            self._compare("as step() begins")

    def exchanged(self) -> None:
        """All that was to leave after a step has left."""
        self._trained = {}

    def _compare(
        self, moment: str, causes: str = OUTSIDE, some: Container[Tensor] | None = None
    ) -> None:
        """Raise RuntimeError, on every rank, where parameters, or some, differ."""
        names: dict[Tensor, str] = {s.param: s.name for s in self._placement.slots}
        known = self.shared.items()
        own = {names[p]: digest(x) for p, x in known if some is None or p in some}
        shards = self._placement.shards
        compare(self._engine.transport, own, f" {moment}", causes, shards)

    def _look_ahead(self) -> dict[Tensor, float]:
        """How many more steps like the last one to send, see [Note: ahead].

        It is told by parameter, of those that momentum moves and that are not all sent
        anyway.
        """
        if self._engine.group.size == 1 or not self._schedule.ahead:
            return {}
        found: dict[Tensor, float] = {}
        for group in self._optimizer.param_groups:
            kept = group["betas"][0] if "betas" in group else group.get("momentum", 0)
            if 0 < kept < 1:
                more = self._schedule.ahead * float(kept) / (1 - float(kept))
                found |= dict.fromkeys(group["params"], more)
        for p, place in self._placement.places.items():
            if traits(place.bucket.collective).dense:
                found.pop(p, None)
        return found

    # - An exchange --------------------------------------------------------------------

    def offer(self, bucket: GradientBucket) -> None:
        """Add what was done since the last exchange to the bucket's residual."""
        bucket.begin_residual()
        self.changed -= {slot.param for slot in bucket.slots}
        for slot in bucket.slots:
            slot.used = self._trained.get(slot.param, True)
            if not slot.used:
                bucket.set_aside(slot)
            elif slot in bucket.waiting:
                bucket.take_back(slot)
        if self._schedule.decay != 1:
            bucket.payload.flat.mul_(self._schedule.decay)
        for slot, view in zip(bucket.slots, bucket.views, strict=True):
            p = slot.param
            if not slot.used and self._schedule.mix is not None:
                continue  # ranks go on differing in it, by what each has kept
            step = torch.sub(slot.local, self.shared[p], out=self._kept(slot))
            more = 1 + self._ahead.get(p, 0.0)
            view.add_(step, alpha=self._weight(p) * more)
            if not slot.used:  # of an optimizer that steps without gradients
                bucket.set_aside(slot)
        known = any(self._mean(slot.param) is not None for slot in bucket.slots)
        weighed = known and self._schedule.against is not None
        bucket.payload.weigh = partial(self._weigh, bucket) if weighed else None

    def settle(self, bucket: GradientBucket) -> None:
        """Move what is shared by what all ranks did, and this rank's parameters to it.

        If that is late, its own steps since are kept, or a share of its parameters
        (`mix`). What was sent ahead of its time is owed. What no rank trained stays as
        it is, with its outer momentum.
        """
        bucket.hold_back()
        trained = [slot for slot in bucket.slots if slot.used]
        late = self._schedule.delay > 0 and not self.closing
        mix = self._schedule.mix
        # What is shared already is left alone: rounding would move it.
        apart = mix is None or self.closing
        moving = [s for s in bucket.slots if s.used or (apart and self._is_apart(s))]
        if not moving:
            return
        params = [slot.local for slot in moving]
        shared = [self.shared[slot.param] for slot in moving]
        if late and mix is None:  # take off all but the steps since
            foreach_sub_(params, shared)
            moved = [self.moved[slot.param] for slot in moving]
            foreach_sub_(params, moved)
        if trained:
            self._move(bucket, trained)
        if not late:
            foreach_copy_(params, shared)
        elif mix is None:
            foreach_add_(params, shared)
        else:
            foreach_mul_(params, mix)
            foreach_add_(params, shared, alpha=1 - mix)
        self._owe(bucket)

    def _move(self, bucket: GradientBucket, slots: Sequence[Slot]) -> None:
        """Have the outer optimizer move what is shared of some slots of a bucket."""
        shared = [self.shared[slot.param] for slot in slots]
        means = [bucket.gradients[slot.index] for slot in slots]
        self._outer.move(shared, means, self._momentum(slots))

    def _is_apart(self, slot: Slot) -> bool:
        """Whether this rank has a parameter otherwise than what is shared of it."""
        return not torch.equal(slot.local, self.shared[slot.param])

    def _owe(self, bucket: GradientBucket) -> None:
        if not any(slot.param in self._ahead for slot in bucket.slots):
            return
        bucket.begin_residual()
        for slot, view in zip(bucket.slots, bucket.views, strict=True):
            p = slot.param
            owed = self._weight(p) * self._ahead.get(p, 0.0)
            if slot.used and owed:
                view.add_(self.moved[p], alpha=-owed)

    def _kept(self, slot: Slot) -> Tensor | None:
        """Memory for what was done to a parameter, if it is asked for afterwards."""
        late = self._schedule.delay and self._schedule.mix is None
        if not late and slot.param not in self._ahead:
            return None
        return self.moved.setdefault(slot.param, torch.empty_like(slot.local))

    def _momentum(self, slots: Sequence[Slot]) -> list[Tensor]:
        """The outer optimizer's, of some parameters; empty if it has none."""
        if not self._outer.momentum:
            return []
        for slot in slots:
            if slot.param not in self.velocity:
                self.velocity[slot.param] = torch.zeros_like(slot.local)
        return [self.velocity[slot.param] for slot in slots]

    def _known(self, p: Tensor) -> tuple[Traits, dict[str, Any]]:
        """How the optimizer steps for a parameter, and what it remembers of it."""
        return self._traits.get(p, Traits()), self._optimizer.state.get(p, {})

    def _weight(self, p: Tensor) -> float:
        """How many times a step counts, see [Note: gain]."""
        noise = self._noise if self._known(p)[0].divides else 1
        return self._schedule.gain * math.sqrt(noise)

    def _mean(self, p: Tensor) -> Tensor | None:
        """The optimizer's mean of gradients, see [Note: weighed]."""
        traits, memory = self._known(p)
        mean = None if traits.mean is None else memory.get(traits.mean)
        return None if mean is None else local(mean)

    @torch.no_grad()  # on the queue, a thread of its own
    def _weigh(self, bucket: GradientBucket, out: Tensor) -> None:
        """Write what is to travel first, see [Note: weighed]."""
        against = self._schedule.against
        assert against is not None
        flat = bucket.payload.flat
        for slot in bucket.slots:
            mean, view = self._mean(slot.param), slot.of(out)
            view.zero_() if mean is None else view.copy_(mean)
        out.mul_(flat)  # below zero: the way down
        F.leaky_relu_(out, -1 / against).add_(FAINT).mul_(flat)


def not_finite(grads: Mapping[str, Tensor]) -> str | None:
    """The name of a gradient that is infinite or NaN; waits for the device once.

    Where a 2-norm is finite, so are all entries; where it is not, it may be too large
    for its type. On a CPU it takes a sixteenth of the time of the largest entry.
    """
    if not grads:
        return None
    norms = foreach_norm(list(grads.values()))
    where = norms[0].device
    told = torch.stack([norm.to(where, torch.float64) for norm in norms]).tolist()
    doubtful = [
        n for n, norm in zip(grads, told, strict=True) if not math.isfinite(norm)
    ]
    return next((n for n in doubtful if not is_finite(grads[n])), None)
