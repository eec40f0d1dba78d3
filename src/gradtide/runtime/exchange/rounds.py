"""What the optimizer's steps of a round did, in the place of gradients.

[Note: rounds] In rounds of several steps (`Schedule.every`) ranks have parameters alike
only as an exchange has left them (`shared`). What travels is what all steps of a round
did; its mean moves `shared` by the outer optimizer, and the parameters follow. If it
comes late, a rank's steps since it left are kept. Nothing is compared or looked for in
between.

[Note: shared] What ranks agreed on last is all that they have alike in a round, and no
exchange of what each has done ever mends it. So before a fragment leaves its checksum
travels with the flags, which costs a reading pass over the fragment, and no message.
A rank abstains that has yet to apply the fragment's last exchange: it skipped the step
at which that was due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from gradtide.core.ops import AllReduce
from gradtide.core.step import Stage
from gradtide.core.torch_internals import (
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_sub_,
)
from gradtide.runtime.checkpoint import OptimizerState, Saved, StateDict, packed
from gradtide.runtime.exchange import Exchange, Surroundings, round_state
from gradtide.runtime.exchange.consensus import Consensus
from gradtide.runtime.exchange.round_state import SavedRound
from gradtide.runtime.guards.checksum import checksum, differ, words_of
from gradtide.runtime.guards.nonfinite import not_finite
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.notices import COUNT
from gradtide.scheme import Scheme
from gradtide.transport.shards import local

APART = (
    "it is what ranks agreed on last in rounds, which only their exchanges change. "
    "Ranks have gone on from states of different runs or moments, or the memory of one "
    "was changed: load what was saved at one moment, on every rank"
)


class RoundExchange:
    """The exchange of rounds of several steps; `before` exchanges in a warm-up."""

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
        self._around, self._step = around, around.step
        self._schedule, self._before = scheme.schedule, before
        self.consensus = consensus
        self.launch, self.finish = before.launch, before.finish  # as gradients have it
        self._closing = False  # a round ends before its time, on all ranks
        self._buffers_due = True  # no forward of this round has begun with rank 0's
        consensus.adopt(scheme)

    def now(self) -> Exchange:
        return self if self.consensus.begun else self._before

    def next(self) -> Exchange:
        """Ranks differ between exchanges from now on: they begin to when all are equal.

        That is for good: a flow under way may be counting.
        """
        consensus = self.consensus
        if consensus.begun and consensus.shared:
            return self
        if consensus.is_due:
            self._buffers_due = False  # the forward of this step began with them
            consensus.begin()
            consensus.remember()
            consensus.widen_once()
            consensus.compare("as a round begins")
        return self.now()

    # - A step -------------------------------------------------------------------------

    def agree(self, leaving: int | None) -> None:
        """All ranks learn of what is not finite, also of what steps have made.

        What ranks agreed on last, of the fragment that is leaving, has to be alike.
        """
        self._guard.hear(self._add_up(self._guard.look(), leaving))

    def _add_up(self, flags: Sequence[int], leaving: int | None) -> list[int]:
        """Add up the ranks' flags.

        Others go with them: this rank's notices, whether any parameter has become
        infinite or NaN, what is trained, and a checksum of what is leaving. What
        is trained is what a round's steps have changed, or the one to come will; when
        it is closing, whatever may differ between ranks.
        """
        astray, leave = self._astray(), self._leaving(leaving)
        leaves = sorted({bucket.fragment for bucket in leave})
        self._weights.leave(leaves, self._schedule.every, self._closing)
        slots = [*self._placement.slots]
        more = [*self._notices.flags(), astray is not None]
        more += [slot.arrived or self._is_changed(slot) for slot in slots]
        own = [*flags, *more, *self._words(leave)]
        message = AllReduce(torch.tensor(own, dtype=torch.int32, device="cpu"))
        with self._wait_for_others():
            told = iter(self._engine.ask("finite", message)().tolist())
        counts = [*islice(told, len(flags))]
        *notices, gone = islice(told, COUNT + 1)
        self.consensus.hear(slots, [*islice(told, len(slots))])
        if self._placement.shards.anywhere(gone > 0):
            self._refuse(astray)
        self._notices.hear(notices)
        if differ([*told]):
            alike = {slot.param for bucket in leave for slot in bucket.slots}
            self.consensus.compare("as a fragment leaves", APART, alike)
        return counts

    def _wait_for_others(self) -> AbstractContextManager[None]:
        """Where this rank may come to wait for slower ones; see `core.grace`."""
        buckets, grace = self._placement.buckets, self._notices.grace
        if grace is None:
            return nullcontext()
        flights = [b.flight for b in buckets if b.stage is Stage.SENT and b.flight]

        def idle() -> bool:  # and not for means that are on their way
            return all(map(self._engine.here, flights))

        here = self._step.position + (not self._closing)
        return grace.waiting(here, idle)

    def _astray(self) -> str | None:
        """A parameter that has become infinite or NaN."""
        named = {slot.name: slot.local for slot in self._placement.slots}
        return not_finite({name: p for name, p in named.items() if p.numel()})

    def _refuse(self, astray: str | None) -> None:
        """Raise RuntimeError, on every rank, for what some rank has found."""
        found = enumerate(self._engine.transport.gather_objects(astray))
        named = ((rank, name) for rank, name in found if name is not None)
        rank, name = next(named, ("of another shard", "a parameter"))
        raise RuntimeError(
            f"{name} has become infinite or NaN on rank {rank} in this round, before "
            "anything of it was sent: load a checkpoint, and lower the learning rate, "
            "clip, or train with torch.amp.GradScaler, which skips such steps"
        )

    def _leaving(self, fragment: int | None) -> list[GradientBucket]:
        """Of what has to be alike: the buckets of a fragment, or all of a round."""
        buckets = self._placement.buckets
        return [b for b in buckets if fragment in (None, b.fragment)]

    def _words(self, leave: Sequence[GradientBucket]) -> list[int]:
        """A checksum of what ranks agreed on last, see [Note: shared]."""
        group, shared = self._engine.group, self.consensus.shared
        if not leave or group.size == 1:
            return []
        late = any(bucket.stage is Stage.SENT for bucket in leave)
        held = (shared[slot.param] for bucket in leave for slot in bucket.slots)
        return words_of(None if late else checksum(held), group)

    def _is_changed(self, slot: Slot) -> bool:
        """Whether this rank's steps have changed a parameter, or are about to."""
        if slot.grad is not None and bool(slot.grad.any()):
            return True
        if self._schedule.mix is None or self._closing:
            return self.consensus.is_apart(slot)
        return slot.param in self.consensus.changed

    def before_update(self, fresh: bool) -> None:
        if self._schedule.mix is not None:
            slots = self._placement.slots
            self.consensus.changed |= {s.param for s in slots if s.grad is not None}

    def after_update(self) -> None: ...

    def left(self) -> None:
        self.consensus.left()
        self._buffers_due |= self._step.position == 0

    def take_buffers(self) -> bool:
        """Those of a round are taken before its first step."""
        due, self._buffers_due = self._buffers_due, False
        return due

    def close(self, leave: Callable[[], None]) -> None:
        """End a round before its time: have all of it `leave`, after it is agreed on.

        RuntimeError, on every rank, for what is NaN, or for what ranks should have
        alike, and have not.
        """
        self._closing = True
        try:
            self._add_up([], None)
            leave()
            self.left()
        finally:
            self._closing = False
            self._weights.left()

    # - An exchange --------------------------------------------------------------------

    def fill(self, bucket: Any) -> None:
        """Add what was done since the last exchange to the bucket's residual."""
        self.consensus.changed -= {slot.param for slot in bucket.slots}
        consensus, mix = self.consensus, self._schedule.mix
        consensus.begin_offer(bucket)
        keep = self._schedule.delay > 0 and mix is None
        for slot, view in zip(bucket.slots, bucket.views, strict=True):
            if not slot.used and mix is not None:
                continue  # ranks go on differing in it, by what each has kept
            weight = consensus.weight(slot.param) * self._weights.share
            view.add_(consensus.done(slot, keep), alpha=weight)
            if not slot.used:  # of an optimizer that steps without gradients
                bucket.set_aside(slot)
        # With a `mix` what was done stays in the parameters, too.
        bucket.keep(self._engine, copy=mix is None)
        bucket.payload.weigh = None

    def apply(self, buckets: Sequence[GradientBucket]) -> None:
        """Move what is shared by what all ranks did, and this rank's parameters to it.

        If that is late, its own steps since are kept, or a share of its parameters
        (`mix`). What no rank trained stays as it is, with its outer momentum.
        """
        for bucket in buckets:
            self._apply(bucket)

    def _apply(self, bucket: GradientBucket) -> None:
        bucket.hold_back()
        bucket.settle(self._engine)
        consensus, mix = self.consensus, self._schedule.mix
        trained = [slot for slot in bucket.slots if slot.used]
        late = self._schedule.delay > 0 and not self._closing
        # What is shared already is left alone: rounding would move it.
        apart = mix is None or self._closing
        moving = [
            s for s in bucket.slots if s.used or (apart and consensus.is_apart(s))
        ]
        if not moving:
            return
        params = [slot.local for slot in moving]
        shared = [consensus.shared[slot.param] for slot in moving]
        if late and mix is None:  # take off all but the steps since
            foreach_sub_(params, shared)
            foreach_sub_(params, [consensus.moved[slot.param] for slot in moving])
        if trained:
            consensus.move(bucket, trained)
        if not late:
            foreach_copy_(params, shared)
        elif mix is None:
            foreach_add_(params, shared)
        else:
            foreach_mul_(params, mix)
            foreach_add_(params, shared, alpha=1 - mix)

    # - What is saved ------------------------------------------------------------------

    @property
    def saved(self) -> Sequence[Saved]:
        return OptimizerState(
            self._around.optimizer, self._placement, self._engine
        ), self

    def save(self, saved: StateDict) -> None:
        round_state.save(self._around, self.consensus, saved)

    def blank(self, saved: StateDict) -> None:
        saved[round_state.key_of(self._around)] = packed({})

    def read(self, saved: Mapping[str, Any]) -> SavedRound | None:
        return round_state.read(self._around, self.consensus, saved)

    def confirm(self, found: SavedRound | None) -> SavedRound | None:
        """Go on from one round: a rank has not noted a step that it skipped last."""
        own = None if found is None else (found.position, round_state.digests(found))
        told = self._engine.transport.gather_objects(own)
        round_state.check_alike(told)
        return found and replace(found, position=max(position for position, _ in told))

    @torch.no_grad()
    def load(self, found: SavedRound | None) -> None:
        self._buffers_due = found is None or not found.own or found.position == 0
        if found is None:
            self.consensus.begun, self._step.position = False, 0
            return
        round_state.load(self._around, self.consensus, found)
        if not found.own:
            self._closing = True
            for bucket in self._placement.buckets:
                if bucket.stage is Stage.SENT:
                    bucket.move("deliver")
                    self._apply(bucket)
            self._closing, self._step.position = False, 0

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Have the module compute with what the ranks agreed on last."""
        params = [local(p) for p in self.consensus.shared]
        own = [p.detach().clone() for p in params]
        with torch.no_grad():
            foreach_copy_(params, list(self.consensus.shared.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                foreach_copy_(params, own)
