"""The optimizer's own steps in the place of gradients.

[Note: local steps] Every rank steps from its own gradients, at parameters that all
ranks have alike. What then travels, and stays in part as a residual, is what the step
did to the parameters:

    step():  own += gain * share * what the optimizer changed
             mean, own = exchange(own);  parameters += mean

Gradients that arrive late, many at once, are divided by what Adam remembers of other
steps; steps that arrive late are as long as they were meant to be. That the residual is
a part of the step is from Qsparse-local-SGD (Basu et al., NeurIPS 2019).

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
finds other values, all compare. That travels beside the exchange, with what each rank
trains, and is heard before anything moves: a message of its own that others wait for
would cost as much as one of theirs. Gradients may be taken elsewhere, as by SAM, but
where a step() never comes, parameters are compared after the third backward.

In the dense steps of a warm-up gradients are exchanged, as by any schedule: the mean of
steps costs as much to send, and learns worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradtide.core.ops import AllReduce
from gradtide.core.payload import traits
from gradtide.core.torch_internals import foreach_copy_
from gradtide.runtime.checkpoint import (
    OptimizerState,
    Saved,
    StateDict,
    common_key,
    packed,
    unpacked,
)
from gradtide.runtime.exchange import Exchange, Surroundings
from gradtide.runtime.exchange.consensus import Consensus
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.notices import COUNT
from gradtide.scheme import Scheme
from gradtide.transport.shards import local

# Backward passes to a step, where they leave from other parameters: SAM's.
PASSES = 2
# By what steps count where the mean of gradients is zero: last, but they do travel.
FAINT = 1e-30


class StepExchange:
    """The exchange of every single step; `before` exchanges in a warm-up."""

    eager, apart = False, True

    def __init__(
        self,
        around: Surroundings,
        scheme: Scheme,
        consensus: Consensus,
        before: Exchange,
    ) -> None:
        self._engine, self._placement = around.engine, around.placement
        self._guard, self._notices = around.guard, around.notices
        self._weights = around.notices.weights
        self._optimizer = around.optimizer
        self._schedule, self._before = scheme.schedule, before
        self._outer_momentum = scheme.outer is not None and scheme.outer.momentum > 0
        self.consensus = consensus
        # As gradients have it.
        self.launch, self.finish = before.launch, before.finish
        self.close, self.take_buffers = before.close, before.take_buffers
        self.shared_parameters, self.left = before.shared_parameters, before.left
        self._moved_on: Callable[[], Any] | None = None  # how many ranks, between steps
        self._absent: Set[Slot] = set()  # that this rank's step does not train
        self._passes = 0  # backward passes since the last step
        self._ahead: Mapping[Tensor, float] = {}  # see [Note: ahead]
        consensus.adopt(scheme)
        self.next()

    def now(self) -> Exchange:
        return self if self.consensus.begun else self._before

    def next(self) -> Exchange:
        """For good: what buckets hold from then on are steps, and no gradients."""
        if not self.consensus.begun and self.consensus.is_due:
            self.consensus.begin()
        return self.now()

    # - A step -------------------------------------------------------------------------

    def agree(self, leaving: int | None) -> None:
        """All ranks learn of gradients that are not finite, and of notices."""
        flags = self._guard.look()
        self._passes += 1
        consensus, late = self.consensus, self._passes > PASSES
        moved = late and bool(consensus.moved_outside())
        self._weights.leave((0,), steps=1)
        own = [*flags, *self._notices.flags(), moved]
        *told, gone = self._engine.ask("finite", _sum(own))().tolist()
        if self._placement.shards.anywhere(gone > 0):
            consensus.compare(f"after {self._passes} backward passes without step()")
        self._notices.hear(told[-COUNT:])
        self._guard.hear(told[:-COUNT])

    def before_update(self, fresh: bool) -> None:
        self._passes = 0
        self.consensus.widen_once()
        # The optimizer steps for what has a gradient.
        slots = [*self._placement.slots]
        trained = [slot.grad is not None for slot in slots]
        self._absent = {s for s, own in zip(slots, trained, strict=True) if not own}
        moved = self.consensus.moved_outside()

        def message() -> AllReduce:
            return _sum([bool(moved), *trained])  # here the host waits for a device

        self._moved_on = self._engine.ask("alike", message)
        self._ahead = self._look_ahead()

    def after_update(self) -> None: ...

    def _hear(self) -> None:
        """Learn what some rank trains. RuntimeError if ranks began the step unlike."""
        moved_on, self._moved_on = self._moved_on, None
        if moved_on is None:
            return
        moved, *trained = moved_on().tolist()
        for slot, count in zip(self._placement.slots, trained, strict=True):
            slot.used = count > 0
        if self._placement.shards.anywhere(moved):
            self.consensus.compare("as step() begins")

    @property
    def saved(self) -> Sequence[Saved]:
        return OptimizerState(self._optimizer, self._placement, self._engine), self

    @property
    def _key(self) -> str:
        return common_key(self._placement, self._engine.group, "outer")

    def save(self, saved: StateDict) -> None:
        """The outer momentum, if there is one."""
        if self._outer_momentum:
            saved[self._key] = packed(self.consensus.by_name(self.consensus.velocity))

    def blank(self, saved: StateDict) -> None:
        if self._outer_momentum:
            saved[self._key] = packed({})

    def read(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        piece = saved.get(self._key)
        found: dict[str, Tensor] = (
            unpacked(piece, "the outer momentum") if piece else {}
        )
        self.consensus.check(found)
        return found

    def confirm(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return found

    @torch.no_grad()
    def load(self, found: dict[str, Tensor]) -> None:
        """Residuals were loaded: they are of steps, if a warm-up was over."""
        self.consensus.velocity = self.consensus.of_names(found)
        self.consensus.begun = False
        if self.consensus.is_due:
            self.consensus.resume()

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

    def fill(self, bucket: Any) -> None:
        """Add what the step did to the bucket's residual."""
        consensus = self.consensus
        absent = {slot for slot in bucket.slots if slot in self._absent}
        bucket.begin_residual()
        bucket.offer(absent)
        consensus.fade(bucket)
        for slot, view in zip(bucket.slots, bucket.views, strict=True):
            p = slot.param
            more = 1 + self._ahead.get(p, 0.0)
            step = consensus.done(slot, keep=p in self._ahead)
            weight = consensus.weight(p) * more * self._weights.share
            # Some optimizers step without gradients.
            if slot not in absent or bucket.hold(slot, step, weight):
                view.add_(step, alpha=weight)
        bucket.keep(self._engine, copy=True)
        known = any(self._mean(slot.param) is not None for slot in bucket.slots)
        weighed = known and self._schedule.against is not None
        bucket.payload.weigh = partial(self._weigh, bucket) if weighed else None

    def apply(self, buckets: Sequence[GradientBucket]) -> None:
        """Move parameters by what all ranks did.

        What was sent ahead of its time is owed. What no rank trained stays as it is,
        with its outer momentum.
        """
        self._hear()
        for bucket in buckets:
            self._apply(bucket)

    def _apply(self, bucket: GradientBucket) -> None:
        bucket.hold_back()
        bucket.settle(self._engine)
        consensus = self.consensus
        trained = [slot for slot in bucket.slots if slot.used]
        # What is shared already is left alone: rounding would move it.
        moving = [s for s in bucket.slots if s.used or consensus.is_apart(s)]
        if not moving:
            return
        if trained:
            consensus.move(bucket, trained)
        shared = [consensus.shared[slot.param] for slot in moving]
        foreach_copy_([slot.local for slot in moving], shared)
        self._owe(bucket)

    def _owe(self, bucket: GradientBucket) -> None:
        if not any(slot.param in self._ahead for slot in bucket.slots):
            return
        bucket.begin_residual()
        for slot, view in zip(bucket.slots, bucket.views, strict=True):
            p = slot.param
            weight = self.consensus.weight(p) * self._weights.share
            owed = weight * self._ahead.get(p, 0.0)
            if slot.used and owed:
                view.add_(self.consensus.moved[p], alpha=-owed)

    def _mean(self, p: Tensor) -> Tensor | None:
        """The optimizer's mean of gradients, see [Note: weighed]."""
        known, memory = self.consensus.known(p)
        mean = None if known.mean is None else memory.get(known.mean)
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


def _sum(flags: Sequence[int]) -> AllReduce:
    """A request for how many ranks have each flag."""
    return AllReduce(torch.tensor(flags, dtype=torch.int32, device="cpu"))
