"""The life cycle of a backward pass: gradients are taken in and buckets leave.

Knows when a backward begins and ends and which bucket leaves next; what becomes of the
means is for the updates to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from gradtide.autograd import after_backward
from gradtide.engine import Engine
from gradtide.layout import LARGE, GradientBucket, Slot
from gradtide.local import LocalSteps
from gradtide.placement import Placement
from gradtide.preconditioning import Launchable, Preconditioning
from gradtide.updates import Updates


class Backward:
    """Where the current backward pass stands."""

    def __init__(
        self, engine: Engine, placement: Placement, updates: Updates, eager: bool
    ) -> None:
        self.engine, self.placement, self.updates = engine, placement, updates
        self.second: Preconditioning | None = None
        self.steps: LocalSteps | None = None  # exchanged in the place of gradients
        self.quiet = False  # inside no_sync()
        self.open = False  # between a backward's first gradient and its end
        self.eager = eager  # buckets leave as they get full
        self._cursor = 0  # buckets launched in this step
        self._plan: tuple[object, Sequence[Launchable]] = (None, ())
        self._forwards = 0  # of the model, in this step
        self._ahead = False  # factors leave in the forward, before backward begins

    @torch.no_grad()
    def begin(self) -> None:
        """A backward pass through the model begins, if it has not begun already."""
        if self.open:
            return
        self.updates.abandon()
        if self.quiet:
            return
        if self.steps is not None:
            self.steps.decide()
        if self.placement.recorded:
            # All follow the order in which rank 0's gradients got ready.
            orders = self.engine.transport.gather_objects(self.placement.recorded)
            self.placement.follow(orders[0])
            if self.second is not None:
                self.second.follow()
        self.open = True
        after_backward(self._end)

    def gradient_hook(self, p: nn.Parameter) -> Callable[[nn.Parameter], None]:
        """Called when the parameter's gradient is complete.

        Hot path: models have hundreds of parameters, and Python is on backward's way.
        """
        placement, cell = self.placement, self.placement.homes[p]
        updates, large = self.updates, p.numel() >= LARGE

        def take(_: nn.Parameter) -> None:
            if self.quiet:
                return
            if not self.open:  # the backward did not start at the model's own output
                self.begin()
            slot, home = cell.slot, cell.home
            if self.steps is not None and self.steps.on:
                slot.arrived = True  # and it stays in `.grad`
                return
            if slot.arrived:
                self._take_again(home, slot)
                return
            slot.arrived = True
            home.missing -= 1
            if large and home not in updates.due:
                home.take(slot)
            if placement.recorded is not None:
                placement.recorded.append(slot.name)
            if not home.missing and self.eager:
                self._launch_full()

        take.gradtide = True  # type: ignore[attr-defined]  # how admit() knows its own
        return take

    @torch.no_grad()
    def _launch_full(self) -> None:
        """Send the buckets that are full and have nothing unsent before them."""
        plan = self._planned()
        while self._cursor < len(plan) and not plan[self._cursor].missing:
            self._launch()

    def _planned(self) -> Sequence[Launchable]:
        """What leaves in this step, in order."""
        if self.second is None:
            return self.placement.buckets
        kfac = self.second.kfac
        key = self.placement.buckets, kfac.factors, kfac.step
        if self._plan[0] != key:
            self._plan = key, self.second.plan()
        return self._plan[1]

    def forward(self) -> None:
        """A forward of the model begins whose factors count.

        What the ranks send between two forwards must not depend on what each of them
        has, so all factors leave that are to leave in the first.
        """
        self._forwards += 1
        if self._forwards == 2 and self._ahead:
            plan = self._planned()
            while self._cursor < len(plan) and not isinstance(
                plan[self._cursor], GradientBucket
            ):
                self._launch()
            self._ahead = False

    def launch_factors(self) -> None:
        """A bucket of factors is full."""
        if self.eager and (self.open or self._ahead):
            self._launch_full()

    def _take_again(self, home: GradientBucket, slot: Slot) -> None:
        if self._planned().index(home) < self._cursor:
            raise RuntimeError(
                f"{slot.name} got a second gradient in one backward pass after its "
                "bucket had left: use checkpoint(..., use_reentrant=False), or a "
                "scheme with schedule=SEQUENTIAL"
            )
        if slot.taken:
            home.take(slot)

    def _launch(self) -> None:
        """Send the next bucket in plan order."""
        home = self._planned()[self._cursor]
        if isinstance(home, GradientBucket):
            self.updates.before_launch(home)
            home.take_in()
            # What leaves last is read first: nothing hides its second half.
            last = home is self.placement.buckets[-1]
            home.bucket.hold = self.updates.deferring and not last
        elif self.second is not None:
            self.second.kfac.leave(home)
        self.engine.launch(home.bucket)
        self._cursor += 1

    @torch.no_grad()
    def _end(self) -> None:
        """Backward is over: what got no gradient leaves too, so that nobody hangs."""
        self.open = False
        buckets = self.placement.buckets
        arrived = [slot.arrived for home in buckets for slot in home.slots]
        if not any(arrived):
            return  # torch.autograd.grad(): nothing was accumulated
        if self.steps is not None and self.steps.on:
            for home in buckets:
                home.rearm()
            self.steps.check()
            return
        if self.second is not None:
            self.second.kfac.collect()
        while self._cursor < len(self._planned()):
            self._launch()
        self._cursor = 0
        self.updates.ask_used(arrived)
        for home in buckets:
            home.rearm()
        if self.second is not None:
            self.second.kfac.invert(self.updates.deferring)
            self._ahead = self._forwards == 1 and self.placement.recorded is None
            self._forwards = 0
        if self.updates.deferring:
            self.updates.hold()
        else:
            self.updates.deliver(buckets)
