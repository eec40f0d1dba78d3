"""What each action of a step does to gradients and parameters: a `Step`'s driver.

It has what actions work with. `Step` says when each comes, and `training` what the
program does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.core.step import Event, Stage, Step
from gradtide.runtime.buffers import SharedBuffers
from gradtide.runtime.deferred.gradient_info import GradientInfo
from gradtide.runtime.deferred.tally import Tally
from gradtide.runtime.deferred.updates import Updates
from gradtide.runtime.exchange import Exchange, Surroundings
from gradtide.runtime.exchange.gradients import GradientExchange
from gradtide.runtime.exchange.unpreconditioned import Unpreconditioned
from gradtide.runtime.guards.checksum import ParameterCheck
from gradtide.runtime.guards.nonfinite import NonFiniteGuard
from gradtide.runtime.guards.scales import Scales
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.placement import Placement
from gradtide.runtime.members import Members
from gradtide.runtime.notices import Notices
from gradtide.runtime.optimizer.deferred_step import owned_by
from gradtide.runtime.turns import Turns
from gradtide.scheme import Scheme

if TYPE_CHECKING:
    from gradtide.runtime.exchange.consensus import Consensus
    from gradtide.runtime.exchange.preconditioned import Launchable, Preconditioning


@dataclass(frozen=True)
class Setup:
    """What a training is made of; `scales` knows the GradScaler, if there is one."""

    model: nn.Module
    optimizer: Optimizer
    scheme: Scheme
    engine: Engine
    scales: Scales
    check_every: int
    buffers: SharedBuffers
    notices: Notices


class Actions:
    """Carries actions out, on one rank; `stage` makes K-FAC's, if the scheme has it.

    Attributes:
        step: The order of a step.
        placement: Where gradients go.
        tally: The message at the end of backward.
        notices: What all ranks hear of each other, whatever a step exchanges.
        guard, check: What refuses gradients, and parameters that have come apart.
        exchange: What this step exchanges; `eager` is its own, for the hot path.
        chosen: What the scheme exchanges, once its warm-up is over.
        gradients: The exchange of gradients.
        gradient_info, updates: What is known of gradients; deferred updates.
    """

    def __init__(
        self,
        setup: Setup,
        turns: Turns,
        stage: Callable[[Placement], Preconditioning | None],
    ) -> None:
        model, engine = setup.model, setup.engine
        self.engine, self._optimizer = engine, setup.optimizer
        self._scales, self.notices = setup.scales, setup.notices
        self.step = Step(self, setup.scheme.schedule)
        size = engine.group.size
        owned = owned_by(setup.optimizer, size)
        self.placement = placement = Placement(model, setup.scheme, size, owned)
        self.guard = NonFiniteGuard(placement, engine.transport)
        every, shards = setup.check_every, placement.shards
        self.check = ParameterCheck(model, engine.transport, every, shards)
        told = self.guard, self.check, setup.notices, setup.scales
        self.tally = Tally(engine, placement, *told)
        self.preconditioning = stage(placement)
        self._stage = self.preconditioning or Unpreconditioned(placement)
        # Where K-FAC or owners are, nobody can have means delivered to find them out.
        self.tally.granted = self.preconditioning is not None or owned is not None
        known = turns, self.step, placement, self.tally, self.guard
        self.gradient_info = GradientInfo(*known, self.preconditioning)
        self.updates = Updates(placement, self.gradient_info)
        self.around = Surroundings(
            model,
            self.step,
            engine,
            placement,
            self.guard,
            setup.notices,
            setup.optimizer,
        )
        self.gradients = GradientExchange(
            self.around, setup.scheme, self.updates, self._stage
        )
        self.consensus: Consensus | None = None  # of ranks that exchange steps
        self._averaged = False  # gradients were exchanged, by another scheme
        self.use(self._exchange_of(setup.scheme))

    @property
    def members(self) -> Members:
        """The ranks that have batches."""
        return self.notices.weights.members

    @members.setter
    def members(self, members: Members) -> None:
        self.notices.weights.members = members

    def adopt(self, scheme: Scheme) -> None:
        """Go on with another scheme, when nothing is on its way."""
        self._stage.finish()
        self.placement.adopt(scheme)
        self.updates.reset()
        self.gradients.adopt(scheme)
        self.step.schedule = scheme.schedule
        if not self.chosen.apart:
            self.note_averaged()
        self.use(self._exchange_of(scheme))

    def note_averaged(self) -> None:
        """Gradients were exchanged before: the optimizer remembers averaged ones."""
        self._averaged = True
        if self.consensus is not None:
            self.consensus.note_averaged()

    def use(self, exchange: Exchange) -> None:
        """Have an exchange take the place of the present one, until `adopt`."""
        self.chosen = exchange
        self.turn_to(exchange.now())

    def turn_to(self, exchange: Exchange) -> None:
        """Have this step's exchange be another one."""
        self.exchange, self.eager = exchange, exchange.eager
        # Hot: what a step asks of every bucket it asks the exchange itself.
        self.fill, self.launch = exchange.fill, exchange.launch
        self.receive, self.apply = exchange.finish, exchange.apply

    def _exchange_of(self, scheme: Scheme) -> Exchange:
        """What a scheme exchanges, once its warm-up is over."""
        if scheme.schedule.launch != "step":
            return self.gradients
        from gradtide.runtime.exchange.consensus import Consensus
        from gradtide.runtime.exchange.rounds import RoundExchange
        from gradtide.runtime.exchange.steps import StepExchange

        self.consensus = self.consensus or Consensus(self.around, self._averaged)
        kind = RoundExchange if scheme.schedule.rounds else StepExchange
        return kind(self.around, scheme, self.consensus, self.gradients)

    # - What a step does ---------------------------------------------------------------

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        return self.placement.buckets

    @property
    def recording(self) -> bool:
        return self.placement.recorded is not None

    def plan(self) -> Sequence[Launchable]:
        return self._stage.plan()

    def prepare(self, quiet: bool) -> None:
        self.updates.withdraw()
        self._stage.release_inverses()
        if not quiet:
            self.updates.let_go()

    def hear(self) -> None:
        """All ranks have begun a backward: hear what was asked, and who exchanges."""
        number = bool(self.placement.recorded) if self.eager else self.step.position
        ordering = self.members.announce(Event.BACKWARD, number) and self.eager
        self.tally.learn()  # on every rank, whatever each has asked for since
        self.notices.settle()
        self.check.refuse()
        self._refuse()
        self.turn_to(self.chosen.next())
        if ordering:
            # All follow the order in which rank 0's gradients got ready; or the first
            # rank's that has one, if rank 0 joined before it had any.
            orders = self.engine.transport.gather_objects(self.placement.order())
            self.placement.follow(next(filter(None, orders)))
            self._stage.follow()
        if self.eager:
            self._weigh()

    def _weigh(self) -> None:
        """Have gradients count by this rank's weight."""
        weights = self.notices.weights
        weights.settle()
        weights.agree(self.engine)
        gain = weights.gain
        for bucket in self.buckets:
            bucket.gain = gain

    def _refuse(self) -> None:
        self._scales.refuse()
        self.notices.weights.refuse()

    def collect(self) -> None:
        self.exchange.agree(self.step.schedule.leaving(self.step.position + 1))

    def conclude(self, hold: bool) -> None:
        """Ask which parameters got a gradient on some rank; let inverses follow."""
        self.tally.ask(hold, abstain=self.members.shadowing)
        self._stage.invert(hold)
        if hold:
            self.updates.defer_gradients()

    def deliver(self) -> None:
        self.tally.learn()
        self.guard.forget()
        for bucket in self.buckets:
            self.updates.deliver(bucket)

    def update(self, fresh: bool) -> None:
        """Refuse what would destroy the model; momentum and K-FAC before the step."""
        self.guard.refuse()
        self._refuse()
        self.updates.withdraw()
        self.updates.refuse_elsewhere()
        self.exchange.before_update(fresh)

    def defer(self) -> None:
        if self.preconditioning is not None:  # it reads means on the queue
            self.updates.scale(self.engine)
        self.updates.note(self._optimizer)
        self._stage.defer(self._optimizer)

    def release(self, bucket: GradientBucket) -> None:
        assert bucket.flight is not None
        if bucket is self.buckets[-1]:  # the first of all
            self.members.announce(Event.RELEASE)
        if bucket.stage is Stage.DUE and bucket.owned:
            self.engine.wait(bucket.flight)
            self.tally.learn()
            self.updates.answer(bucket, self.engine.group.rank)
        self.engine.release(bucket.flight)
        if bucket.stage is Stage.DUE:
            self._stage.release(bucket)

    def refuse(self, bucket: GradientBucket) -> None:
        for slot in bucket.slots:
            if slot.arrived:
                raise RuntimeError(
                    f"{slot.name} was read past torch's functions (by compiled code, "
                    "or an extension) before its deferred update: call sync.flush() "
                    "before such a forward, or use a schedule that updates at step(), "
                    "such as 'wfbp'"
                )

    def needs(self, bucket: GradientBucket) -> Iterable[GradientBucket]:
        self.tally.learn()
        if self.guard.ranks:
            for other in self.buckets:  # to name the parameter
                if other.stage is Stage.DUE:
                    other.finish(self.engine)
            self.members.announce(Event.STEP)
            self.guard.refuse()
        return self._stage.needs(bucket)

    def here(self, bucket: GradientBucket) -> bool:
        # A step of the optimizer costs the host as much as a layer's forward, with
        # which a device is done before it. In host memory updates stay apart: what one
        # has brought into the processor's cache is read next.
        if bucket.payload.flat.is_cpu:
            return False
        return bucket.flight is None or self.engine.here(bucket.flight)
