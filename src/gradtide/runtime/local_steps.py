"""The optimizer's own steps in the place of gradients.

[Note: local steps] Every rank steps from its own gradients, at parameters that all
ranks have alike. What then travels, and stays in part as a residual, is what the step
did to the parameters:

    step():  own += gain * what the optimizer changed;  mean, own = exchange(own)
             parameters += mean

Gradients that arrive late, many at once, are divided by what Adam remembers of other
steps; steps that arrive late are as long as they were meant to be. That the residual is
a part of the step is from Qsparse-local-SGD (Basu et al., NeurIPS 2019).

[Note: gain] Adam divides by the root of the mean square of what it sees. A rank's own
gradient is mostly noise, which in a mean over P ranks is smaller by the root of P: so
much shorter are the steps, and `gain` makes up for it. It is 1 for optimizers that do
not divide; `gradtide.runtime.probing` finds out which do. A schedule's own `gain` comes
on top of that: where entries wait long, some of what they should do is not done when
training ends. What optimizers remember of averaged gradients, when a warm-up ends, is
too small for a rank's own by the same token, and is made larger once.

[Note: weighed] With Adam a step is as long for a parameter that hardly matters. The
selection scores are therefore the square of the step times the optimizer's mean of
gradients: half way between the longest steps and those that should lower the loss most.
A residual that the mean of gradients has come to oppose counts for less (AGAINST): by
then it is mostly noise.

[Note: ahead] Momentum spreads what a gradient does over steps to come, 9 times as much
with a momentum of .9 as the first step does. Entries that were sent are then soon the
largest again, with more of the same: half of what travelled, in a trial of `exdyna`. So
a part of it (AHEAD) is sent with the step, and owed: the steps to come make it good.
That also makes up for delay, which is what is wrong with entries that wait.

[Note: alike] Parameters must be alike when a step begins. What the user changes in
between is, but an optimizer may change them outside `step()` by what each rank has
alone. So every rank looks whether they are what the last exchange left, and if one
finds other values, all compare: that travels while the optimizer steps. Gradients may
be taken elsewhere, as by SAM, but where a step() never comes, parameters are compared
after the third backward.

In the dense steps of a warm-up gradients are exchanged, as by any schedule: the mean of
steps costs as much to send, and learns worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.core.ops import AllReduce
from gradtide.core.payload import traits
from gradtide.runtime.broadcast import digest
from gradtide.runtime.buckets import GradientBucket, Slot, lives_in
from gradtide.runtime.checksum import compare
from gradtide.runtime.nonfinite import NonFiniteGuard, is_finite
from gradtide.runtime.placement import Placement
from gradtide.runtime.probing import Traits, probe
from gradtide.transport.shards import local

# The share of what momentum will make of a gradient that is sent with it.
AHEAD = 0.25
# How much of a step counts that the mean of gradients opposes, see [Note: weighed].
AGAINST = 0.1
# Backward passes to a step, where they leave from other parameters: SAM's.
PASSES = 2
OUTSIDE = (
    "it was changed outside step() by what each rank has alone, as some optimizers do. "
    "Where steps are exchanged, only step() may; use a schedule that exchanges "
    "gradients, such as 'wfbp'"
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
        gain: float,
    ) -> None:
        self._engine, self._placement = engine, placement
        self._guard, self._optimizer = guard, optimizer
        self._traits = probe(optimizer)
        # How many times the squares of a rank's gradients are those of their mean.
        self._noise = engine.group.size
        self._gain = gain
        self.on = False  # steps are exchanged; not in the dense steps of a warm-up
        # Parameters as the last exchange left them, from where the next step counts;
        # and how that moved them: memory, by bucket.
        self._before: dict[GradientBucket, list[Tensor]] = {}
        self._moved: dict[GradientBucket, list[Tensor]] = {}
        self._moved_on: Callable[[], Any]  # how many ranks, between steps
        self._passes = 0  # backward passes since the last step
        self._ahead: Mapping[Tensor, float] = {}  # see [Note: ahead]
        self.decide()

    def decide(self) -> None:
        """A backward begins: is it for steps or for gradients?"""
        first, before = self._placement.buckets[0], self.on  # the others are as far
        self.on = not traits(first.collective).dense_next(first.payload.state)
        if before or not self.on:
            return
        # No gradient may live in a bucket any more: the residuals of steps do.
        for place in self._placement.places.values():
            grad = place.slot.grad
            if grad is not None and lives_in(grad, place.bucket.payload.flat):
                place.slot.grad = grad.clone()

    # - A step -------------------------------------------------------------------------

    def check(self) -> None:
        """After backward: all ranks learn of gradients that are not finite.

        A rank that has none marks one of its own: a GradScaler skips everywhere then.
        """
        grads = {
            slot.name: grad
            for slot in self._placement.slots
            if (grad := slot.grad) is not None and grad.numel()
        }
        culprit = _not_finite(grads)
        rank, size = self._engine.group
        self._passes += 1
        flags = torch.zeros(size + 1, dtype=torch.int32)
        flags[rank] = culprit is not None
        flags[-1] = self._passes > PASSES and self._moved_outside()
        *counts, moved = self._engine.ask("finite", AllReduce(flags))().tolist()
        if self._placement.shards.anywhere(moved):
            self._compare(f"after {self._passes} backward passes without step()")
        self._guard.update(counts, culprit)
        if self._guard.ranks and culprit is None:
            for grad in list(grads.values())[:1]:
                grad[(0,) * grad.dim()] = math.nan

    def stepping(self) -> None:
        """The optimizer's step begins."""
        first = self._placement.buckets[0]
        if traits(first.collective).dense_last(first.payload.state):
            self._widen()
        self._passes = 0
        flag = torch.tensor([self._moved_outside()], dtype=torch.int32)
        self._moved_on = self._engine.ask("alike", AllReduce(flag))
        self._ahead = self._look_ahead()

    def _moved_outside(self) -> bool:
        """Whether parameters are not what the last exchange left, see [Note: alike].

        They are remembered, so that the next call compares with what they are now.
        """
        buckets = self._placement.buckets
        if self._before.keys() != set(buckets):  # they were cut anew
            self._before = {bucket: _memory(bucket) for bucket in buckets}
            self._moved = {bucket: _memory(bucket) for bucket in buckets}
        elif all(all(map(torch.equal, _params(b), self._before[b])) for b in buckets):
            return False
        self.remember()
        return True

    def remember(self) -> None:
        """Parameters are as the next step is to find them."""
        for bucket in self._placement.buckets:
            torch._foreach_copy_(self._before[bucket], _params(bucket))

    def stepped(self) -> None:
        """The optimizer has made its step; RuntimeError if ranks began it unlike."""
        if self._placement.shards.anywhere(self._moved_on().item()):
            self._compare("as step() begins")

    def _compare(self, moment: str) -> None:
        """Raise RuntimeError, on every rank, where parameters are not alike."""
        own = {
            slot.name: digest(before)
            for bucket in self._placement.buckets
            for slot, _, before, _ in self._rows(bucket)
        }
        shards = self._placement.shards
        compare(self._engine.transport, own, f" {moment}", OUTSIDE, shards)

    def _widen(self) -> None:
        """Have the optimizer expect a rank's own gradients, see [Note: gain]."""
        for p in self._placement.places:
            traits, memory = self._known(p)
            if traits.divides:
                for name in memory.keys() & set(traits.squares):
                    memory[name].mul_(self._noise)

    def _look_ahead(self) -> dict[Tensor, float]:
        """How many more steps like the last one to send, see [Note: ahead].

        It is told by parameter, of those that momentum moves and that are not all sent
        anyway.
        """
        if self._engine.group.size == 1:
            return {}
        found: dict[Tensor, float] = {}
        for group in self._optimizer.param_groups:
            kept = group["betas"][0] if "betas" in group else group.get("momentum", 0)
            if 0 < kept < 1:
                more = AHEAD * float(kept) / (1 - float(kept))
                found |= dict.fromkeys(group["params"], more)
        for p, place in self._placement.places.items():
            if traits(place.bucket.collective).dense:
                found.pop(p, None)
        return found

    def offer(self, bucket: GradientBucket) -> None:
        """Move what the step changed from the module to the bucket's residual."""
        bucket.begin_residual()
        for slot, view, before, step in self._rows(bucket):
            own = slot.local
            torch.sub(own, before, out=step)
            own.copy_(before)
            more = 1 + self._ahead.get(slot.param, 0.0)
            view.add_(step, alpha=self._weight(slot.param) * more)
        weighed = any(self._mean(slot.param) is not None for slot in bucket.slots)
        bucket.payload.weigh = partial(self._weigh, bucket) if weighed else None

    def settle(self, bucket: GradientBucket) -> None:
        """Add what all ranks did, and owe what was sent ahead of its time."""
        torch._foreach_add_(_params(bucket), list(bucket.gradients()))
        if not any(slot.param in self._ahead for slot in bucket.slots):
            return
        bucket.begin_residual()
        for slot, view, _, step in self._rows(bucket):
            owed = self._weight(slot.param) * self._ahead.get(slot.param, 0.0)
            view.add_(step, alpha=-owed)

    def _known(self, p: Tensor) -> tuple[Traits, dict[str, Any]]:
        """How the optimizer steps for a parameter, and what it remembers of it."""
        return self._traits.get(p, Traits()), self._optimizer.state.get(p, {})

    def _weight(self, p: Tensor) -> float:
        """How many times a step counts, see [Note: gain]."""
        return self._gain * math.sqrt(self._noise if self._known(p)[0].divides else 1)

    def _mean(self, p: Tensor) -> Tensor | None:
        """The optimizer's mean of gradients, see [Note: weighed]."""
        traits, memory = self._known(p)
        mean = None if traits.mean is None else memory.get(traits.mean)
        return None if mean is None else local(mean)

    def _rows(
        self, bucket: GradientBucket
    ) -> Iterable[tuple[Slot, Tensor, Tensor, Tensor]]:
        """Every slot, its part of the bucket, what it was, and its step."""
        before, steps = self._before[bucket], self._moved[bucket]
        return zip(bucket.slots, bucket.views, before, steps, strict=True)

    @torch.no_grad()  # on the queue, a thread of its own
    def _weigh(self, bucket: GradientBucket, out: Tensor) -> None:
        """Write what is to travel first, see [Note: weighed]."""
        flat = bucket.payload.flat
        for slot in bucket.slots:
            mean, view = self._mean(slot.param), slot.of(out)
            view.zero_() if mean is None else view.copy_(mean)
        out.mul_(flat)  # below zero: the way down
        F.leaky_relu_(out, -1 / AGAINST).add_(FAINT).mul_(flat)


def _params(bucket: GradientBucket) -> list[Tensor]:
    return [slot.local for slot in bucket.slots]


def _memory(bucket: GradientBucket) -> list[Tensor]:
    return [torch.empty_like(p) for p in _params(bucket)]


def _not_finite(grads: Mapping[str, Tensor]) -> str | None:
    """The name of a gradient that is infinite or NaN; waits for the device once.

    Where a 2-norm is finite, so are all entries; where it is not, it may be too large
    for its type. On a CPU it takes a sixteenth of the time of the largest entry.
    """
    if not grads:
        return None
    norms = torch._foreach_norm(list(grads.values()))
    where = norms[0].device
    told = torch.stack([norm.to(where, torch.float64) for norm in norms]).tolist()
    doubtful = [
        n for n, norm in zip(grads, told, strict=True) if not math.isfinite(norm)
    ]
    return next((n for n in doubtful if not is_finite(grads[n])), None)
