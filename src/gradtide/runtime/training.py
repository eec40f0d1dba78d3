"""A replica's training: what the program does, as a step's beginnings and ends.

The hooks on the user's module and optimizer (`hooks`) tell it. `Step` says what happens
when, and `actions` what that does to gradients and parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradtide.core.step import Event, Stage
from gradtide.core.torch_internals.autograd import after_backward, in_backward
from gradtide.runtime.actions import Actions, Setup
from gradtide.runtime.checkpoint import RunState
from gradtide.runtime.deferred.due import watch
from gradtide.runtime.deferred.grads import DeferredGrad
from gradtide.runtime.deferred.unexchanged import UNSEEN, Unexchanged
from gradtide.runtime.layout.placement import Placement
from gradtide.runtime.turns import Turns
from gradtide.transport.shards import local, redistribute

if TYPE_CHECKING:
    from gradtide.runtime.exchange.preconditioned import Preconditioning
    from gradtide.runtime.guards.undo import UndoGuard

BROKEN_OFF = (
    "the last backward pass raised before its end, so the ranks may have sent "
    "different gradients: end the run, or call sync.remove() on every rank and "
    "replicate() again"
)


class Ranks(Protocol):
    """The ranks that train, where they come and go."""

    def surviving(
        self, training: Training, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A call that ends a step, and not the run, if its exchange fails."""

    def shortened(self, training: Training, steps: int) -> None:
        """This rank, for which others wait, leaves `steps` steps of a round out."""


class Training:
    """Carries steps out, on one rank; with K-FAC its constructor is collective."""

    def __init__(self, setup: Setup) -> None:
        self.engine, self.model = setup.engine, setup.model
        self.optimizer, self.buffers = setup.optimizer, setup.buffers
        self.scales = setup.scales
        self.turns = Turns(setup.engine.transport.progress)
        # Has a parameter's hook called; returns whether it was lost.
        self.rehook: Callable[[nn.Parameter], bool] = lambda _: False
        # RuntimeError, by name, for a parameter that no bucket has.
        self.check_setup: Callable[[], None] = lambda: None
        self.no_sync_active = False  # inside no_sync()
        # Where ranks may be lost, goes on without what a call would have exchanged.
        self.surviving: Callable[[Callable[..., Any]], Callable[..., Any]] = _plainly
        self.lost = False  # nothing is exchanged any more: ranks have to meet anew
        self.spoilt = False  # gradients are of a backward whose exchange has failed
        self._quiet = False  # as `no_sync_active` would be if it were not lost
        self.num_steps = 0  # steps of the optimizer
        self.begun = False  # a gradient of the backward under way is there
        self.num_skipped = 0  # exchanged gradients that no step took
        self.num_exchanges = 0  # backward passes whose gradients were exchanged
        self._untaken = False  # an exchanged backward is over that no step has taken
        self._stepping = False  # inside the optimizer's step
        self._deferred = False  # the last step's update was
        self._unseen: str | None = None  # has a gradient that this step alone knows
        stage = partial(self._stage, setup)
        self.actions = Actions(setup, self.turns, stage)
        self.placement, self.tally = self.actions.placement, self.actions.tally
        self.guard, self.check = self.actions.guard, self.actions.check
        self.step, self.updates = self.actions.step, self.actions.updates
        self.gradient_info = self.actions.gradient_info
        self.preconditioning = self.actions.preconditioning
        self.weights, self._grace = setup.notices.weights, setup.notices.grace
        self._shortened: Callable[[int], None] = lambda _: None
        self.forwarded = False  # a forward has begun whose backward is to exchange
        self._idle = False  # this rank's own step is to take nothing
        self.unexchanged = Unexchanged(self.placement)
        self._undone: UndoGuard | None = None  # since parameters were loaded

    def _stage(self, setup: Setup, placement: Placement) -> Preconditioning | None:
        """K-FAC between a mean and the optimizer; None if the scheme has none."""
        if setup.scheme.preconditioner is None:
            return None
        from gradtide.runtime.exchange.preconditioned import preconditioned

        calls = self.begin, self.full, self.scales.given
        how = setup.model, setup.scheme.preconditioner, setup.engine, *calls
        return preconditioned(placement, *how)

    # - What hooks tell ----------------------------------------------------------------

    @torch.no_grad()
    def expect(self) -> None:
        """A backward through the model begins, if none has; gradients may not come.

        With torch.autograd.grad() none do, and one rank alone may call it: nothing is
        sent before the first is there (`begin`).
        """
        with self.turns:
            opened = self._open(self.no_sync_active)
        if opened:
            # Behind what others have called then: FSDP2 may have gradients till then.
            end = self.surviving(self._end)
            after_backward(lambda: after_backward(end))

    @torch.no_grad()
    def begin(self) -> None:
        """The first gradient of a backward is there, or what K-FAC makes of one."""
        self.expect()
        with self.turns:
            if self.step.open and not self.begun:
                self.agree()

    def agree(self) -> None:
        """All ranks have begun a backward: do what only all of them together can."""
        self.begun = True
        try:
            if not self.step.silent:
                self.actions.hear()
        except BaseException:
            self.begun = self.step.open = False
            raise

    def note_skipped(self) -> None:
        """Count a step that nobody has made of the last backward's gradients."""
        over = self._untaken and not self.step.open
        if over and not _accumulating(self.placement.places):
            self.num_skipped += 1
            self._untaken = False
            if self.step.skipped():
                self.num_steps += 1
                self.weights.stepped(eager=False)

    def _open(self, quiet: bool) -> bool:
        self.note_skipped()
        opened = self.step.begin(quiet)
        if opened:
            self.weights.begin()
            self._idle = False
        if opened and self._undone is not None:
            self._undone.resolve()
        return opened

    def full(self) -> None:
        """A bucket has all of its gradients (hot path)."""
        recorded = torch.is_grad_enabled()  # as a backward with create_graph is
        with torch.no_grad() if recorded else nullcontext(), self.turns:
            self.step.full()

    @torch.no_grad()
    def _end(self) -> None:
        with self.turns:
            self._ended()

    def _ended(self) -> None:
        absent = [slot for slot in self.placement.slots if not slot.arrived]
        if absent:  # not used; or its hook is lost, or another is in its place
            self.check_setup()
        for slot in absent:
            if self.rehook(slot.param):
                slot.arrived = slot.grad is not None
        # With nothing arrived, it was torch.autograd.grad().
        arrived = any(slot.arrived for slot in self.placement.slots)
        for place in self.unexchanged.kept if arrived else ():
            # Nothing of this backward, but of one inside no_sync(): it leaves now.
            redistribute(place.slot.param)
            place.slot.arrived |= place.slot.grad is not None
        if arrived and not self.begun:
            self.agree()
        self._close(arrived)

    def _close(self, arrived: bool) -> None:
        """A backward is over; what has arrived is complete, and leaves."""
        if arrived:
            self.unexchanged.kept.clear()
            if not (self.weights.own or self.actions.eager):
                self._give_nothing()
            if self._grace is not None and not self._untaken:
                self._shorten(self._grace.asked)
        if arrived and not self.step.silent:
            self.actions.members.end()
        self.end(arrived)
        if self.step.fresh and self.weights.nobody:
            self._give_nothing()
        if arrived:
            self.num_exchanges += 1
            self.forwarded = False
            self.weights.ended()
        # What a step's closure evaluates is taken by that step.
        self._untaken = (self._untaken or arrived) and not self._stepping

    def _shorten(self, asked: int | None) -> None:
        """Have a round end, or come closer to its end, where others wait for this rank.

        In the first backward of a step, for all that follow are exchanged with theirs.
        """
        left_out = 0 if asked is None else self.step.leave_out(asked)
        if left_out:
            self.num_steps += left_out
            self.weights.leave_out(left_out)
            self._shortened(left_out)
            self.agree()

    def end(self, arrived: bool) -> None:
        """A backward is over, on all ranks that have begun it."""
        self.begun = False
        leaves = arrived and not self.step.silent
        self.step.end(arrived)
        if leaves:
            self.buffers.leave(self.actions.members)

    @torch.no_grad()
    def exchange_now(self, nothing: bool = False) -> None:
        """Exchange what is in `.grad`, as the end of a backward does; collective.

        Or `nothing`, where this rank skips a step of others.
        """
        if self.step.open and not in_backward():
            raise RuntimeError(BROKEN_OFF)
        if in_backward():
            call = "skip" if nothing else "exchange"
            raise RuntimeError(
                f"{call}() during a backward pass: call it between backward and step()"
            )
        with self.turns:
            self._open(quiet=False)
            if nothing:
                self.drop_gradients()
                self.weights.skip()
            self.agree()
            for slot in self.placement.slots:
                redistribute(slot.param)
                slot.arrived = slot.grad is not None
            if self.actions.recording:  # nobody has seen an order: it stays what it is
                self.placement.record_all()
            self._close(arrived=True)

    def _give_nothing(self) -> None:
        """Zeros are in the place of gradients, until a step that is to take none.

        So norms and a GradScaler find something.
        """
        self._idle = True
        for p, place in self.placement.places.items():
            p.grad, place.slot.arrived = torch.zeros_like(p), False

    @torch.no_grad()
    def stepping(self, optimizer: Optimizer, closes: bool = False) -> None:
        """A step of an optimizer begins: the replica's own, or one that was found.

        If it `closes`, its closure is still to write the gradients that it takes.
        """
        with self.turns:
            if self._idle:
                self.drop_gradients()
            if self.engine.group.size > 1:
                self.scales.look()
                self._unseen = None
                if not closes:
                    self._look_for_unexchanged(optimizer)
            self._begin_step()

    def _begin_step(self) -> None:
        if self.guard.ranks or not (self.actions.eager or self.step.silent):
            self.actions.members.announce(Event.STEP, self.step.position)
        self._deferred = self.step.step()
        self.turns.begin_step(alone=self._deferred)
        if self._deferred:
            watch(self)
            self.step.apply(self.updates.expect())
        self._stepping, self._untaken = True, False

    def _look_for_unexchanged(self, optimizer: Optimizer) -> None:
        self._unseen = self.unexchanged.find(optimizer, self.num_exchanges)
        if self._unseen and not self.actions.members.inside:
            # No backward has decided: perhaps it is the step that counts.
            self.actions.turn_to(self.actions.chosen.next())
        if not self.actions.eager:
            self._unseen = None
        if self._unseen:
            for p in self.placement.places:
                self.rehook(p)
            self.unexchanged.warn(self._unseen)

    @torch.no_grad()
    def stepped(self, optimizer: Optimizer, closed: bool) -> None:
        """It is over; `closed` if it had a closure, whose gradients it has taken."""
        with self.turns:
            if closed and self._unseen is None and self.engine.group.size > 1:
                self._look_for_unexchanged(optimizer)
            self.unexchanged.taken[optimizer] = self.num_exchanges
            self._end_step()

    def _end_step(self) -> None:
        self._stepping = False
        if self._unseen and not self.actions.members.inside:
            self._unseen = None
            self.check.compare_now(self.engine, UNSEEN)
        self.num_steps += 1
        if self._deferred:
            self.updates.put_back()
        self.turns.end_step()
        self.engine.transport.progress.steps = self.num_steps
        self._leave()
        actions = self.actions
        if actions.eager and actions.chosen.apart:  # gradients have stood in for steps
            actions.members.send_parameters()

    def _leave(self) -> None:
        """The optimizer's step is over: what is to leave after it does."""
        self.actions.exchange.after_update()
        self.step.stepped()
        self.actions.exchange.left()
        self.weights.stepped(self.actions.eager)

    def shadow_step(self) -> None:
        """A step that other ranks take, after `join()`: this rank's own is zero."""
        self.guard.refuse()
        if not self.actions.eager:
            self.actions.exchange.before_update(fresh=False)
            self._leave()

    def survive(self, ranks: Ranks) -> None:
        """End a step, and not the run, where an exchange fails."""
        self.surviving = partial(ranks.surviving, self)
        self._shortened = partial(ranks.shortened, self)
        self.gradient_info.surviving = self.surviving

    @torch.no_grad()
    def lose(self) -> None:
        """An exchange has failed: this step is none, and nothing else is sent.

        Zeros are in the place of gradients, which the program may look at, until the
        optimizer's step, which finds none.
        """
        under_way = any(bucket.open for bucket in self.placement.buckets)
        under_way |= self.step.open or self._untaken
        self.spoilt = under_way and not self._stepping
        self._quiet = self.no_sync_active
        self.lost = self.no_sync_active = True
        self.begun = self.step.open = False
        self.updates.abandon()
        if self.spoilt:
            for p in self.placement.places:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)

    @property
    def quiet(self) -> bool:
        """Whether the program wants nothing exchanged, as inside no_sync()."""
        return self._quiet if self.lost else self.no_sync_active

    @quiet.setter
    def quiet(self, quiet: bool) -> None:
        if self.lost:
            self._quiet = quiet
        else:
            self.no_sync_active = quiet

    def skip(self) -> None:
        """No optimizer's step is to take gradients of an exchange that was lost."""
        self.spoilt = False
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Have no gradients."""
        self._idle = False
        for p in self.placement.places:
            p.grad = None

    # - What a replica asks for --------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """Apply all that is due."""
        self.gradient_info.ensure_updated(self.placement.buckets[::-1])

    @torch.no_grad()
    def end_round(self) -> None:
        """End a round before its time; a collective call, between two steps."""
        self.actions.exchange.close(self.step.close)
        if self.step.schedule.rounds:
            self.buffers.leave(self.actions.members)

    def arrive(self) -> None:
        """Wait for what steps have sent, and apply nothing of it."""
        if self.actions.eager or not self.turns.trains:
            return
        for bucket in self.placement.buckets:
            if bucket.stage is Stage.SENT:
                self.actions.exchange.finish(bucket)

    def notes(self) -> dict[str, Any]:
        """What of how steps are made has to be known for the next one to be equal.

        A norm has other last digits if it is summed up from whole means, as it is until
        all ranks send those of their parts. And an update is not deferred until it is
        known which modules read parameters.
        """
        tally = self.tally
        return {
            "granted": tally.granted,
            "wished": tally.wished,
            "unit": self.weights.known,
            "seen": tuple(self.placement.seen()),
        }

    def follow(self, before: Training) -> None:
        """Go on where another training of the same ranks was, for it is over."""
        self.num_steps, self.num_skipped = before.num_steps, before.num_skipped
        self.num_exchanges = before.num_exchanges
        self.placement.compiled = before.placement.compiled
        before.actions.members.follow(self)
        if before.num_steps and not before.actions.chosen.apart:
            self.actions.note_averaged()

    def resume(self, saved: RunState) -> None:
        """Go on after steps of another run, whose state all ranks agreed on."""
        self.updates.reset()
        self.num_steps = saved.step or 0
        self.tally.granted |= saved.granted
        self.tally.wished |= saved.wished
        self.weights.go_on(saved.unit)

    def undone(self) -> UndoGuard:
        """What looks after the residual where parameters are loaded."""
        from gradtide.runtime.guards.undo import UndoGuard

        self._undone = self._undone or UndoGuard(self.placement)
        return self._undone

    def resolve_loads(self) -> None:
        """Drop the residual of steps that were undone, if parameters were loaded."""
        if self._undone is not None:
            self._undone.resolve()

    def drop(self) -> None:
        """Forget what steps have sent: another state is to be loaded."""
        self.undone().keep()
        self.arrive()
        for bucket in self.placement.buckets:
            if bucket.stage is Stage.SENT:
                bucket.move("deliver")

    @torch.no_grad()
    def gather(self) -> None:
        """Deliver now what is held until step(), but for dropped gradients."""
        dropped = self.step.held and not self.wanted
        with self.turns:
            self.step.gather()
            self.updates.withdraw()
        if dropped:
            self.drop_gradients()

    def moment(self) -> str | None:
        """Where a step stands; None between a step and the next backward."""
        if self.step.open:
            return "during a backward pass"
        if self.actions.members.inside:
            return "inside join()"
        fresh = self.step.held or self.step.fresh
        if fresh and _accumulating(self.placement.places):
            return "between backward and step()"
        return None

    @property
    def wanted(self) -> bool:
        """Whether means wait for step(): the program has not dropped the gradients."""
        return self.step.held and _accumulating(self.placement.places)


def _accumulating(params: Iterable[nn.Parameter]) -> bool:
    """Whether gradients are there to which those of a backward are added.

    Of one that is not here it is told without having it.
    """
    for grad in (p.grad for p in params):
        if isinstance(grad, DeferredGrad) and grad.value is None:
            if not grad.zeroed:
                return True
        elif grad is not None and local(grad).any():
            return True
    return False


def _plainly(call: Callable[..., Any]) -> Callable[..., Any]:
    return call
