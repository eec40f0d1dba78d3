"""From a launched bucket to `.grad`, or to the parameters themselves.

Means are delivered to `.grad`; or, when updates are deferred, they are held until
`step()`, then due, and applied before a module reads the parameters. Knows buckets, the
engine and the deferred step; nothing of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.alarm import Alarm
from gradtide.autograd import Hook
from gradtide.deferred import DeferredStep
from gradtide.engine import Engine
from gradtide.layout import GradientBucket, Slot
from gradtide.momentum import Momentum
from gradtide.ops import AllReduce
from gradtide.owners import unscale
from gradtide.placement import Placement, Watch
from gradtide.preconditioning import Preconditioning
from gradtide.promise import Promise


class Updates:
    """Where the current update stands. A bucket is held or due only if deferred."""

    def __init__(self, engine: Engine, placement: Placement, in_forward: bool) -> None:
        self.engine, self.placement = engine, placement
        self.held: list[GradientBucket] = []  # between backward and step()
        self.due: set[GradientBucket] = set()  # between step() and the update
        self._step: DeferredStep | None = None
        self._used: Callable[[], Any] | None = None
        self.alarm = Alarm(placement, engine.transport)
        self.second: Preconditioning | None = None
        self.momentum: Momentum | None = None  # of a scheme that takes it over
        self.delivered = False  # means are in `.grad`, and step() has not been called
        self._in_forward = in_forward
        # In a list: a tensor's hash is slow for what runs once a parameter and step.
        self._promises: list[tuple[Slot, nn.Parameter, Promise]] = []
        self._watch: Watch | None = None

    @property
    def deferring(self) -> bool:
        """Whether the buckets that leave now are to be held."""
        return self._in_forward and self.placement.recorded is None

    def adopt(self, in_forward: bool) -> None:
        """Go on with buckets that were cut anew; nothing is on its way."""
        assert not self.held
        assert not self.due
        self._in_forward, self._watch, self._promises = in_forward, None, []

    def watch(self, model: nn.Module) -> list[Any]:
        """See the modules of `model` run; returns the hooks' handles."""
        self._watch = Watch(model, Hook(lambda module, _: self.before_read(module)))
        return list(self._watch.handles.values())

    # - After backward -----------------------------------------------------------------

    def ask_used(self, arrived: Sequence[bool]) -> None:
        """Have all ranks told which parameters got a gradient on some rank."""

        def flags() -> AllReduce:
            numbers = [*arrived, *self.alarm.ring()]
            return AllReduce(torch.tensor(numbers, dtype=torch.int32))

        self._used = self.engine.ask("used", flags)

    def hold(self) -> None:
        """Keep all buckets at their cut, with promises in the place of gradients."""
        self.held = list(self.placement.buckets)
        if not self._promises:  # by now the buckets are final
            self._promises = [
                (slot, slot.param, Promise.of(slot.param, self._unscale))
                for home in self.held
                for slot in home.slots
            ]
        for _, p, promise in self._promises:
            promise.zeroed = False
            p.grad = promise

    def deliver(self, homes: Sequence[GradientBucket]) -> None:
        """Wait for the means and put them in `.grad`."""
        for home in homes:
            self.engine.finish(home.bucket)
        self._learn_used()
        self.alarm.forget()
        for home in homes:
            home.expose()
        self.delivered = True

    def deliver_held(self) -> None:
        """Deliver what is held after all."""
        if self.held:
            self.engine.release(home.bucket for home in reversed(self.held))
            held, self.held = self.held, []
            for _, p, promise in self._promises:
                # Not only where a mean replaces it: nobody may have used this one.
                if p.grad is promise:
                    p.grad = None
            self.deliver(held)

    def abandon(self) -> None:
        """Drop means that no step() wanted: a GradScaler skipped it, or zero_grad()."""
        if self.second is not None:
            self.second.kfac.settle()
        if not self.held:
            return
        for _, p, promise in self._promises:
            if p.grad is promise:
                if not promise.zeroed:
                    raise RuntimeError(
                        "two backward passes before one step(): under a deferred "
                        "schedule all but the last belong inside sync.no_sync(); "
                        "or call sync.gather_gradients() between them"
                    )
                p.grad = None
        for home in self.held:
            home.clean = self.engine.drop(home.bucket)
        self.held = []
        self._learn_used()
        self.alarm.forget()

    # - After step() -------------------------------------------------------------------

    @torch.no_grad()
    def stepping(self, optimizer: Optimizer) -> None:
        """An ordinary step begins: refuse what would destroy the model."""
        fresh, self.delivered = self.delivered, False
        self.alarm.refuse()
        if self.momentum is not None and fresh and self._moved():
            self.momentum.take()
        if self.second is not None and fresh:
            homes = self.placement.homes
            self.second.precondition(
                optimizer, lambda p: p.grad if p in homes else None
            )

    def stepped(self) -> None:
        """The optimizer's step is over."""
        if self.momentum is not None:
            self.momentum.give_back()

    @torch.no_grad()
    def defer(self, optimizer: Optimizer) -> None:
        """Note what step() would do now, and let the second halves go."""
        self.flush()
        if not self.held:
            self.stepping(optimizer)
            return
        self._step = DeferredStep(optimizer)
        for slot, p, promise in self._promises:
            slot.wanted = here = p.grad is promise
            if here:
                slot.wanted = not promise.zeroed
                p.grad = None
        self._release(optimizer)
        self.due, self.held = set(self.held), []
        if self._watch is not None:
            self._watch.on(self.placement.reads)

    def _release(self, optimizer: Optimizer) -> None:
        """Let the second halves go, in forward order."""
        if self.second is None:
            self.engine.release(home.bucket for home in reversed(self.held))
            return
        flights = {home: self.engine.flying[home.bucket.name] for home in self.held}

        def read(p: nn.Parameter) -> Tensor:
            """A mean, when its second half is through (on the lane)."""
            cell = self.placement.homes[p]
            mean: Tensor = flights[cell.home].mean
            return cell.slot.of(mean)

        self.second.defer(optimizer)
        for home in reversed(self.held):
            self.engine.release([home.bucket])
            self.second.release(home, read)

    def before_read(self, module: nn.Module) -> None:
        """A module is about to run: what it reads must be up to date."""
        if self.placement.recorded is not None:
            self.placement.called.add(module)
            return
        for home in self.placement.reads.get(module, ()):
            self.apply(home)
        if self._watch is not None:
            self._watch.off([module])

    def before_launch(self, home: GradientBucket) -> None:
        """A bucket that no module read since step() must not have been read at all."""
        self._apply_unread(home)
        load = home.bucket.load
        load.moved = False
        if self.momentum is not None:
            load.momentum = self.momentum.now()

    def _apply_unread(self, home: GradientBucket) -> None:
        if home not in self.due:
            return
        for slot in home.slots:
            if slot.arrived:
                raise RuntimeError(
                    f"{slot.name} was used outside the forward of its module, before "
                    "its deferred update: call sync.flush() before such a forward, or "
                    "use a schedule that updates at step(), such as 'wfbp'"
                )
        self.apply(home)

    @torch.no_grad()
    def flush(self) -> None:
        """Apply all that is due."""
        for home in reversed(self.placement.buckets):
            self.apply(home)

    def apply(self, home: GradientBucket) -> None:
        """Carry out the deferred step for one bucket, if it is still due."""
        if home not in self.due:
            return
        assert self._step is not None
        self.due.remove(home)
        self._arrive(home)
        self._learn_used()
        if self.alarm.ranks:
            for other in self.due:  # to name the parameter
                self._arrive(other)
            self.alarm.refuse()
        if self.second is not None:
            self._precondition(home, self.second)
        start = self.engine.clock()
        updates = [(s.param, mean) for s, mean in home.delivered() if s.wanted]
        device = home.bucket.load.flat.device.type
        # As at step(): outside the forward's inference mode and autocast.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            aside = [p.grad for p, _ in updates]  # no_sync() may have begun anew
            for p, mean in updates:
                p.grad = mean
            moved = home.bucket.load.moved
            self._step.apply((p for p, _ in updates), momentum=not moved)
            for (p, _), grad in zip(updates, aside, strict=True):
                p.grad = grad
        self._rest(home)
        self.engine.applied.append((start, self.engine.clock()))

    def _arrive(self, home: GradientBucket) -> None:
        """Wait for a bucket that is due; it may have been needed before its turn."""
        if home.bucket.name in self.engine.flying:
            self.engine.finish(home.bucket)

    def _precondition(self, home: GradientBucket, second: Preconditioning) -> None:
        """Precondition the layers of a bucket, with what other buckets hold of them."""
        groups = second.needed(home)
        if not groups:
            return
        homes = second.homes(groups)
        for other in homes:
            self._arrive(other)
        gradients = {
            slot.param: mean
            for other in homes
            for slot, mean in other.delivered()
            if slot.wanted
        }
        second.apply(groups, gradients.get)

    def _rest(self, home: GradientBucket) -> None:
        """Watch no longer for what was up to date once this bucket was."""
        reads, due = self.placement.reads, self.due
        if self._watch is not None:
            readers = self.placement.readers[home]
            self._watch.off(m for m in readers if due.isdisjoint(reads[m]))

    # - Both ---------------------------------------------------------------------------

    def _moved(self) -> bool:
        """Whether momentum is in the means already."""
        return any(home.bucket.load.moved for home in self.placement.buckets)

    def _learn_used(self) -> None:
        """Learn which parameters some rank used; all leave the others alone."""
        if self._used is not None:
            counts = self._used().tolist()
            self._used = None
            slots = [slot for home in self.placement.buckets for slot in home.slots]
            for slot, count in zip(slots, counts, strict=False):
                slot.used = count > 0
            self.alarm.hear(counts[len(slots) :])

    def _unscale(self, asked: Promise, found_inf: Tensor, inv_scale: Tensor) -> None:
        if self.second is not None:
            self.second.kfac.statistics.check_scale()
        unscale(self.engine, self.held, asked, found_inf, inv_scale)
        self._learn_used()
        if self.alarm.ranks:
            found_inf.fill_(1.0)
