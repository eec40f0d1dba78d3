"""A replica's training: what each action of a step does to gradients and parameters.

`Step` says what happens when. Hooks on the user's module and optimizer (`hooks`) tell
it what the program does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.alarm import Alarm
from gradtide.autograd import after_backward
from gradtide.collectives.corrected import moves, takes_over, with_momentum
from gradtide.engine import Engine
from gradtide.gradients import LARGE, GradientBucket, Slot
from gradtide.kfac.preconditioner import Preconditioner
from gradtide.local import LocalSteps
from gradtide.momentum import Momentum
from gradtide.ops import AllReduce
from gradtide.owners import clip, unscale
from gradtide.placement import Placement
from gradtide.preconditioning import Launchable, Preconditioning
from gradtide.promise import Promise
from gradtide.scheme import Scheme
from gradtide.step import Stage, Step
from gradtide.updates import Updates


class Training:
    """Carries steps out, on one rank. A collective constructor, with K-FAC."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheme: Scheme,
        engine: Engine,
        scale: Callable[[], float] | None,
    ) -> None:
        self.engine, self.optimizer = engine, optimizer
        self.quiet = False  # inside no_sync()
        self.taken = 0  # steps of the optimizer
        self.placement = Placement(model, scheme, engine.group.size)
        self.updates = Updates(self.placement, self._unscale)
        self.alarm = Alarm(self.placement, engine.transport)
        self.step = Step(self, scheme.schedule)
        self.momentum = momentum_of(optimizer, scheme)
        self._used: Callable[[], Any] | None = None
        self.steps: LocalSteps | None = None
        if scheme.schedule.launch == "step":
            gain = scheme.schedule.gain
            self.steps = LocalSteps(engine, self.placement, optimizer, gain)
        self.second: Preconditioning | None = None
        if scheme.preconditioner is not None:
            full, config = self.step.full, scheme.preconditioner
            kfac = Preconditioner(model, config, engine, self.begin, full, scale)
            self.second = Preconditioning(self.placement, kfac)

    def adopt(self, scheme: Scheme) -> None:
        """Go on with another scheme, when nothing is on its way."""
        if self.second is not None:
            self.second.kfac.finish()
        self.placement.adopt(scheme)
        self.updates.reset()
        self.step.schedule = scheme.schedule
        self.momentum = momentum_of(self.optimizer, scheme)

    # - What hooks tell ----------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> None:
        """A backward pass through the model begins, if it has not begun already."""
        if self.step.begin(self.quiet):
            after_backward(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        buckets = self.placement.buckets
        # With nothing arrived, it was torch.autograd.grad().
        self.step.end(any(slot.arrived for b in buckets for slot in b.slots))

    def gradient_hook(self, p: nn.Parameter) -> Callable[[nn.Parameter], None]:
        """Called when the parameter's gradient is complete.

        Hot path: models have hundreds of parameters, and Python is on backward's way.
        """
        placement, place, step = self.placement, self.placement.places[p], self.step
        steps, large, due = self.steps, p.numel() >= LARGE, Stage.DUE

        def take(_: nn.Parameter) -> None:
            if self.quiet:
                return
            if not step.open:  # the backward did not start at the model's own output
                self.begin()
            slot, bucket = place.slot, place.bucket
            if steps is not None and steps.on:
                slot.arrived = True  # and it stays in `.grad`
                return
            if slot.arrived:
                _take_again(bucket, slot)
                return
            slot.arrived = True
            bucket.missing -= 1
            if large and bucket.stage is not due:
                bucket.take(slot)
            if placement.recorded is not None:
                placement.recorded.append(slot.name)
            if not bucket.missing:
                with torch.no_grad():
                    step.full()

        take.gradtide = True  # type: ignore[attr-defined]  # how admit() knows its own
        return take

    def before_read(self, module: nn.Module) -> None:
        """A module is about to run: what it reads must be up to date."""
        if self.placement.recorded is not None:
            self.placement.called.add(module)
            return
        for bucket in self.placement.reads.get(module, ()):
            self.step.apply(bucket)
        self.updates.rest([module])

    @torch.no_grad()
    def stepping(self) -> None:
        """The optimizer's step begins."""
        self.step.step()

    @torch.no_grad()
    def stepped(self) -> None:
        """The optimizer's step is over."""
        self.taken += 1
        if self.momentum is not None:
            self.momentum.give_back()
        if self.steps is None or not self.steps.on:
            return
        self.steps.stepped()
        self.step.stepped()
        self.steps.remember()

    @property
    def refuses_closures(self) -> str | None:
        """Why the optimizer's step can have no closure; None where it can."""
        if self.steps is not None:
            return (
                "step(closure) evaluates the model as often as each rank likes, and "
                "every time all ranks have to: call step() without a closure, or use "
                "'wfbp'"
            )
        if self.step.schedule.update == "forward":
            return (
                "step(closure) evaluates the model inside the step, which a deferred "
                "update cannot: call step() without a closure, or use 'wfbp'"
            )
        if self.second is not None:
            return (
                "step(closure) makes gradients inside the step, after K-FAC has "
                "preconditioned: call step() without a closure"
            )
        return None

    # - What a replica asks for --------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """Apply all that is due."""
        self.step.flush()

    @torch.no_grad()
    def gather(self) -> None:
        """Deliver what is held after all."""
        self.step.gather()

    @torch.no_grad()
    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Scale gradients to a total 2-norm of at most `max_norm`."""
        if self.local:
            return nn.utils.clip_grad_norm_(
                self.placement.places, max_norm, error_if_nonfinite=error_if_nonfinite
            )
        return clip(self.engine, self.buckets, max_norm, error_if_nonfinite)

    def moment(self) -> str | None:
        """Where a step stands; None between a step and the next backward."""
        if self.step.open or self.quiet:
            return "during a backward pass or inside no_sync()"
        left = any(p.grad is not None for p in self.placement.places)
        if self.step.held or (self.step.fresh and left):
            return "between backward and step()"
        return None

    # - What a step does ---------------------------------------------------------------

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        return self.placement.buckets

    @property
    def recording(self) -> bool:
        return self.placement.recorded is not None

    @property
    def local(self) -> bool:
        return self.steps is not None and self.steps.on

    def plan(self) -> Sequence[Launchable]:
        return self.placement.buckets if self.second is None else self.second.plan()

    def prepare(self) -> None:
        if self.steps is not None:
            self.steps.decide()
        if self.placement.recorded:
            # All follow the order in which rank 0's gradients got ready.
            orders = self.engine.transport.gather_objects(self.placement.recorded)
            self.placement.follow(orders[0])
            if self.second is not None:
                self.second.follow()

    def fill(self, bucket: Any) -> None:
        if not bucket.keeps:
            assert self.second is not None
            self.second.kfac.leave(bucket)
        elif self.steps is not None and self.steps.on:
            self.steps.offer(bucket)
        else:
            bucket.moved = self.momentum is not None and self._hand_over(bucket)
            bucket.take_in()

    def _hand_over(self, bucket: GradientBucket) -> bool:
        """Whether the bucket's exchange computes the optimizer's momentum of now.

        Alone nothing is selected, and the optimizer can do it itself.
        """
        assert self.momentum is not None
        alone = self.engine.group.size == 1
        a, b = (0.0, 1.0) if alone else self.momentum.now()
        bucket.collective = with_momentum(bucket.collective, a, b)
        return a > 0 and moves(bucket.collective, bucket.load.state)

    def launch(self, bucket: Any, hold: bool) -> None:
        bucket.launch(self.engine, hold)

    def collect(self) -> None:
        if self.second is not None:
            self.second.kfac.collect()

    def ask(self) -> None:
        """Have all ranks told which parameters got a gradient on some rank."""
        arrived = [slot.arrived for bucket in self.buckets for slot in bucket.slots]

        def flags() -> AllReduce:
            numbers = [*arrived, *self.alarm.ring()]
            return AllReduce(torch.tensor(numbers, dtype=torch.int32))

        self._used = self.engine.ask("used", flags)

    def follow(self, hold: bool) -> None:
        if self.second is not None:
            self.second.kfac.invert(hold)

    def check(self) -> None:
        assert self.steps is not None
        self.steps.check()

    def promise(self) -> None:
        self.updates.promise()

    def withdraw(self, dropped: bool) -> None:
        self.updates.withdraw(dropped)

    def receive(self, bucket: GradientBucket) -> None:
        bucket.finish(self.engine)

    def learn(self) -> None:
        """Learn which parameters some rank used; all leave the others alone."""
        if self._used is not None:
            counts = self._used().tolist()
            self._used = None
            slots = [slot for bucket in self.buckets for slot in bucket.slots]
            for slot, count in zip(slots, counts, strict=False):
                slot.used = count > 0
            self.alarm.hear(counts[len(slots) :])

    def deliver(self) -> None:
        self.alarm.forget()
        for bucket in self.buckets:
            bucket.expose()

    def dropped(self) -> None:
        self.alarm.forget()

    def drop(self, bucket: GradientBucket) -> None:
        bucket.drop(self.engine)

    def settle(self) -> None:
        if self.second is not None:
            self.second.kfac.settle()

    def update(self, fresh: bool) -> None:
        """Refuse what would destroy the model; momentum and K-FAC before the step."""
        if self.steps is not None and self.steps.on:
            self.steps.stepping()
            return
        self.alarm.refuse()
        moved = any(bucket.moved for bucket in self.buckets)
        if self.momentum is not None and fresh and moved:
            self.momentum.take()
        if self.second is not None and fresh:
            places = self.placement.places
            self.second.precondition(
                self.optimizer, lambda p: p.grad if p in places else None
            )

    def defer(self) -> None:
        self.updates.note(self.optimizer)
        if self.second is not None:
            self.second.defer(self.optimizer)
            # On the lane a mean is there before anybody has taken delivery of it.
            self._flights = {bucket: bucket.flight for bucket in self.buckets}

    def release(self, bucket: GradientBucket) -> None:
        assert bucket.flight is not None
        self.engine.release([bucket.flight])
        if self.second is not None and bucket.stage is Stage.DUE:
            flights = self._flights

            def read(p: nn.Parameter) -> Tensor:
                place = self.placement.places[p]
                flight = flights[place.bucket]
                assert flight is not None
                return place.slot.of(flight.mean)

            self.second.release(bucket, read)

    def deferred(self) -> None:
        self.updates.expect()

    def refuse(self, bucket: GradientBucket) -> None:
        for slot in bucket.slots:
            if slot.arrived:
                raise RuntimeError(
                    f"{slot.name} was used outside the forward of its module, before "
                    "its deferred update: call sync.flush() before such a forward, or "
                    "use a schedule that updates at step(), such as 'wfbp'"
                )

    def needs(self, bucket: GradientBucket) -> Iterable[GradientBucket]:
        if self.alarm.ranks:
            for other in self.buckets:  # to name the parameter
                if other.stage is Stage.DUE:
                    other.finish(self.engine)
            self.alarm.refuse()
        return () if self.second is None else self.second.needs(bucket)

    def apply(self, bucket: GradientBucket) -> None:
        if self.steps is not None and self.steps.on:
            self.steps.settle(bucket)
            return
        if self.second is not None:
            gradients = {
                slot.param: mean
                for other in self.second.needs(bucket)
                for slot, mean in other.delivered()
                if slot.wanted
            }
            self.second.update(bucket, gradients.get)
        start = self.engine.clock()
        self.updates.apply(bucket)
        self.engine.telemetry.applied.append((start, self.engine.clock()))

    def _unscale(self, asked: Promise, found_inf: Tensor, inv_scale: Tensor) -> None:
        if self.second is not None:
            self.second.kfac.statistics.check_scale()
        held = self.buckets if self.step.held else ()
        unscale(self.engine, held, asked, found_inf, inv_scale)
        self.learn()
        if self.alarm.ranks:
            found_inf.fill_(1.0)


def momentum_of(optimizer: Optimizer, scheme: Scheme) -> Momentum | None:
    """The optimizer's momentum, if the scheme takes it over; ValueError if it can't."""
    return Momentum(optimizer) if takes_over(scheme.collective) else None


def _take_again(bucket: GradientBucket, slot: Slot) -> None:
    if bucket.stage is Stage.SENT:
        raise RuntimeError(
            f"{slot.name} got a second gradient in one backward pass after its "
            "bucket had left: use checkpoint(..., use_reentrant=False), or a "
            "scheme with schedule=SEQUENTIAL"
        )
    if slot.taken:
        bucket.take(slot)
