"""What trains a module: by which scheme, and with which optimizer, until it is removed.

The public side is `replica`; here are set-up, optimizers that are found late, and
schemes that take each other's place. What carries steps out is a `Training`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradtide.admission import (
    admit,
    admit_another,
    admit_optimizer,
    refuse_elastic,
    refuse_grace,
)
from gradtide.core.engine import Engine
from gradtide.core.levels import levels_of
from gradtide.fusion import BySize, Search
from gradtide.runtime import own_state, saving
from gradtide.runtime.actions import Setup
from gradtide.runtime.buffers import SharedBuffers
from gradtide.runtime.checkpoint import Saved, StateDict
from gradtide.runtime.guards.scales import Scales
from gradtide.runtime.guards.validation import (
    SetupGuard,
    Signature,
    check_ranks_agree,
    describe,
    describe_optimizer,
)
from gradtide.runtime.hooks import Hooks
from gradtide.runtime.layout.broadcast import synchronize
from gradtide.runtime.layout.parameters import averaged, thawed
from gradtide.runtime.notices import Heard, Notices
from gradtide.runtime.optimizer.deferred_step import holds
from gradtide.runtime.optimizer.finder import Finder
from gradtide.runtime.training import Training
from gradtide.scheme import (
    Scheme,
    as_scheme,
    knows_optimizer,
    start,
    undecided,
    with_levels,
)
from gradtide.transport import Mesh, ProcessGroup, connect

if TYPE_CHECKING:  # loaded by what needs them (tests/test_imports.py)
    from gradtide.core.membership import Membership
    from gradtide.kfac.preconditioner import Preconditioner
    from gradtide.planner.auto.selector import AutoSelector
    from gradtide.planner.tuning.online import Tuner
    from gradtide.regrouping import Regrouping
    from gradtide.runtime.refresh import Aside

LOG = logging.getLogger("gradtide")

Buffers: TypeAlias = Literal["broadcast", "mean", "local"]


class Session:
    """A module in training; its constructor is a collective call.

    Attributes:
        model: The module.
        optimizer: The optimizer that was passed or found; or one that never steps.
        scheme: The one in use, or the one that waits for the optimizer.
        tuning: The search for a fusion, if there is one.
        auto: What chooses the scheme, if that is still to be done.
        engine: What drives the exchanges.
        trained: What carries steps out, also of a session that is over.
        hooks: What tells it of the program's steps.
        regrouping: What has ranks come and go, or None.
        aside: Residuals of parameters that were trained and are frozen now.
        owner: The replica.
    """

    engine: Engine
    trained: Training
    hooks: Hooks
    notices: Notices
    _shared_buffers: SharedBuffers

    def __init__(
        self,
        owner: object,
        model: nn.Module,
        optimizer: Optimizer | None,
        scheme: str | Scheme,
        process_group: ProcessGroup | Mesh | None,
        buffers: Buffers,
        grad_scaler: torch.amp.GradScaler | None,
        alike: Sequence[Tensor],
        check_every: int,
        elastic: Membership | None = None,
    ) -> None:
        self.removed, self.owner = False, owner
        self._comm_hook: tuple[object, Callable[..., Any]] | None = None
        self.aside: Aside | None = None
        self.model, self.process_group = model, process_group
        self._given, self._buffering = scheme, buffers
        self._check_every, self.grad_scaler = check_every, grad_scaler
        self._unknown = optimizer is None
        params = [p for _, p in averaged(model)]
        # What stands for an optimizer that is not known never makes a step.
        self.optimizer = SGD(params) if optimizer is None else optimizer
        self.regrouping: Regrouping | None = None
        self._grace = None if elastic is None else elastic.grace
        if elastic is None:
            self.connect()
            synchronize(self.engine, alike)  # tensors that become rank 0's
            if optimizer is not None:
                own_state.share(self.engine, optimizer)
            self.train()
        else:
            from gradtide.regrouping import Regrouping

            chosen = as_scheme(scheme)
            refuse_elastic(model, optimizer, chosen, process_group, self._grace)
            self.regrouping = Regrouping(self, elastic)
            self.regrouping.begin()
        found = params if self._unknown else []
        self.finder = Finder(found, self._step_begins, self._step_ends)
        if self.engine.group.rank == 0 and LOG.isEnabledFor(logging.INFO):
            words = f"{self.scheme!r}, {self.engine}"
            words += ", when its optimizer is known" if self.waiting else ""
            LOG.info("%s is replicated: %s", type(model).__name__, words)
            LOG.info("%s is replicated:\n%s", type(model).__name__, self.describe())

    # - The ranks ----------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to the ranks, and agree with them; collective."""
        # Parameters on the meta device are nowhere: `look` refuses them by name.
        where = (p.device for _, p in averaged(self.model) if not p.is_meta)
        device = next(where, torch.device("cpu"))
        transport = connect(self.process_group, device)

        def prepare() -> tuple[Scheme, Signature]:
            chosen = with_levels(as_scheme(self._given), transport.hosts)
            return chosen, self.look(chosen, self.known_optimizer)

        try:
            self.scheme = check_ranks_agree(transport, prepare)
        except Exception:
            transport.close()
            raise
        if hasattr(self, "engine"):
            self.engine.move(transport)
        else:
            self.engine = Engine(transport)
        self.engine.undoes = self.regrouping is not None
        self.engine.levels = levels_of(transport.group, self.scheme.levels)

    def look(
        self, scheme: Scheme, optimizer: Optimizer | None, own: object = None
    ) -> Signature:
        """What ranks have to have in common; ValueError for what cannot be trained.

        What `own` averages already is no hindrance.
        """
        how = self._buffering, self._check_every
        admit(self.model, optimizer, scheme, self.process_group, *how, own)
        return describe(self.model, scheme, *how, self._grace, optimizer)

    def train(self) -> Training:
        """Begin to train, when parameters are alike on all ranks."""
        if hasattr(self, "_shared_buffers"):
            self._shared_buffers.rest()
        self._shared_buffers = SharedBuffers(self.model, self.engine)
        if self._buffering == "mean":
            self._shared_buffers.average()
        before = getattr(self, "notices", None)  # of ranks that were others
        size = self.engine.group.size
        self.notices = Notices(self._shared_buffers, size, self._grace)
        if before is not None:
            self.notices.follow(before)
        self._scales = Scales(self.engine, self.grad_scaler)
        self._train_with(self.optimizer)
        return self.trained

    def give_up(self) -> None:
        """Close the connections, if there are any, and wait for nobody."""
        if hasattr(self, "engine"):
            self.engine.transport.abandon()

    def meet(self) -> Hooks | None:
        """Have ranks meet anew, if they have changed: the hooks to go on with."""
        if self.regrouping is None or not self.regrouping.due(self.training):
            return None
        return self.hooks

    @property
    def known_optimizer(self) -> Optimizer | None:
        """The optimizer that was passed or found."""
        return None if self._unknown else self.optimizer

    def describe(self) -> str:
        """As `Replica.describe`."""
        from gradtide.runtime.describe import table

        instead = {
            "by a communication hook: what it sends is not counted": (
                bool(self._comm_hook)
            ),
            "densely, until the optimizer is known": self.waiting,
            "densely, until auto has decided": undecided(self.scheme) is not None,
        }
        return table(self.training, next((k for k, v in instead.items() if v), None))

    def _train_with(self, optimizer: Optimizer) -> None:
        """Begin to train; with K-FAC, a collective call."""
        model, now, self.optimizer = self.model, self._now(self.scheme), optimizer
        self._admitted = SetupGuard(model, optimizer)
        known = self.engine, self._scales, self._check_every, self._shared_buffers
        setup = Setup(model, optimizer, now, *known, self.notices)
        self.trained = Training(setup)
        if self.regrouping is not None:
            self.trained.survive(self.regrouping)
        self.hooks = Hooks(
            self.trained,
            self._buffering == "broadcast",
            self._stepped,
            self.owner,
            self.meet,
        )
        self.hooks.follow()
        self.training.check_setup = self._admitted.check
        self.auto: AutoSelector | None = None
        auto = undecided(self.scheme)
        if auto is not None and not self.waiting:
            from gradtide.planner.auto.selector import AutoSelector

            self.auto = AutoSelector(self, auto)
        self.tuning = self._search()

    def _stepped(self, silent: bool) -> None:
        """A step is over; nothing has left in it if it was `silent`."""
        if self.tuning is not None:
            self.tuning.stepped()
        if self.auto is not None:
            self.auto.stepped(silent)
        if self.regrouping is not None:
            self.regrouping.stepped(self.trained, silent)

    def _now(self, scheme: Scheme) -> Scheme:
        """What to train with until the optimizer is known, or `auto` has decided."""
        waiting = self._unknown and knows_optimizer(scheme)
        return Scheme(levels=scheme.levels) if waiting else start(scheme)

    @property
    def training(self) -> Training:
        """What carries out steps: all that a replica does is done by it.

        Raises RuntimeError once `remove` was called. So every method does, but for
        those that count what was (they ask `trained`); what exchanges something past
        this is refused by the queue.
        """
        if self.removed:
            raise RuntimeError(
                "sync.remove() was called, and the replica is of no use any more: call "
                "replicate() again, on every rank"
            )
        return self.trained

    @property
    def kfac(self) -> Preconditioner | None:
        """The K-FAC preconditioner; None if the scheme has none."""
        stage = self.training.preconditioning
        return None if stage is None else stage.kfac

    @property
    def waiting(self) -> bool:
        """Whether the scheme begins when the optimizer has made a step."""
        return self._unknown and knows_optimizer(self.scheme)

    # - The optimizer ------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Go on with an optimizer that was not passed, or with another one."""
        self.refuse_moment("attach")
        self.apply_pending()
        own_state.share(self.engine, optimizer)
        self._agree_on(optimizer)
        self._change(optimizer)

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer is about to step, perhaps one that was not passed."""
        if optimizer is self.optimizer:
            return None
        self._admitted.check()
        own_state.share(self.engine, optimizer)
        if knows_optimizer(self.scheme):
            self.training.gather()
            self.apply_pending()
            self._agree_on(optimizer)
            if not self.training.actions.eager:  # gradients are the rank's own
                self._change(None)
                self.training.exchange_now()
        return self.hooks.stepping(args, kwargs)

    def _step_ends(self, optimizer: Optimizer) -> None:
        """It has stepped: a scheme that has waited for it begins."""
        if optimizer is self.optimizer:
            return
        self.hooks.stepped(optimizer)
        if knows_optimizer(self.scheme):
            self._change(optimizer)

    def _agree_on(self, optimizer: Optimizer) -> None:
        """Raise ValueError, on every rank, if some rank cannot use the optimizer."""

        def prepare() -> tuple[None, Signature]:
            admit_optimizer(self.model, optimizer, self.scheme)
            return None, describe_optimizer(optimizer)

        check_ranks_agree(self.engine.transport, prepare)

    def _change(self, optimizer: Optimizer | None) -> None:
        """Go on with another optimizer, or none yet, when nothing is on its way."""
        before = self.training
        self.detach()
        with thawed(before.placement.places):  # some may be frozen for now
            self._begin_anew(before, optimizer)

    def _begin_anew(self, before: Training, optimizer: Optimizer | None) -> None:
        self._unknown = optimizer is None
        self._train_with(optimizer or SGD([p for _, p in averaged(self.model)]))
        self.training.follow(before)
        if self._comm_hook:
            self._exchange_by_hook(*self._comm_hook)

    def go_on(self, before: Training, optimizer: Optimizer | None) -> None:
        """Train the parameters that there are now, alike on all ranks; collective.

        `before` is the training so far, which is detached.
        """
        self._shared_buffers.renew(self._buffering == "broadcast")
        self._begin_anew(before, optimizer)
        self.finder.follow(p for _, p in averaged(self.model))

    @property
    def heard(self) -> Heard:
        """What all ranks have heard of each other, alike after the same step."""
        deferred = self.training.step.schedule.update == "forward"
        return self.notices.settled if deferred else self.notices.last

    # - The scheme ---------------------------------------------------------------------

    def adopt(self, scheme: str | Scheme) -> None:
        """Go on with another scheme; collective, as `Replica.adopt`."""
        self.refuse_moment("adopt")
        self.flush()

        def prepare() -> tuple[Scheme, Signature]:
            chosen = with_levels(as_scheme(scheme), self.engine.transport.hosts)
            before = self.scheme, self.training.placement
            refuse_grace(chosen, self._grace)
            admit_another(self.model, self.known_optimizer, chosen, *before)
            return chosen, {"scheme": repr(chosen)}

        if self.tuning is not None:
            self.tuning.drain()
        chosen = check_ranks_agree(self.engine.transport, prepare)
        self.training.end_round()
        self._adopt(chosen)
        self._given = chosen
        self.tuning = self._search()

    def _adopt(self, scheme: Scheme) -> None:
        """`adopt` what all ranks have agreed on, when nothing is on its way."""
        self.engine.levels = levels_of(self.engine.group, scheme.levels)
        self._comm_hook = None
        self.training.actions.adopt(self._now(scheme))
        self.hooks.follow()
        self.scheme = scheme

    def use_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a hook exchange gradients; collective, as `Replica.use_comm_hook`."""
        if self.auto is not None:
            raise ValueError("a communication hook takes the place of a decided scheme")
        if self.regrouping is not None:
            raise ValueError("a communication hook has a process group of its own")
        fusion = self.scheme.fusion
        self.adopt(Scheme() if isinstance(fusion, Search) else Scheme(fusion=fusion))
        self._exchange_by_hook(state, hook)

    def _exchange_by_hook(self, state: object, hook: Callable[..., Any]) -> None:
        from gradtide.runtime.exchange.hook import HookExchange

        self._comm_hook, actions = (state, hook), self.training.actions
        around, gradients = actions.around, actions.gradients
        actions.use(HookExchange(around, gradients, state, hook))

    def _search(self) -> Tuner | None:
        """Begin to search for a fusion, if the scheme's is one that is searched for."""
        fusion, undone = self.scheme.fusion, undecided(self.scheme) is not None
        if not isinstance(fusion, Search) or undone or self.waiting:
            return None
        from gradtide.planner.tuning.online import Tuner

        flats = [bucket.payload.flat for bucket in self.training.placement.buckets]
        whole = sum(flat.nbytes for flat in flats)
        return Tuner(self.engine, fusion, whole, flats[0].device, self._recut)

    def _recut(self, fusion: BySize) -> None:
        """Go on with other buckets, between step() and the next backward."""
        self.flush()
        self._adopt(replace(self.scheme, fusion=fusion))

    # - Moments ------------------------------------------------------------------------

    def flush(self) -> None:
        """Apply the updates that step() has deferred."""
        self.training.flush()
        self.training.arrive()
        self._shared_buffers.arrive()

    def refuse_moment(self, call: str) -> None:
        """Raise RuntimeError unless all that was exchanged was used or dropped."""
        if (moment := moment_of(self)) is not None:
            remedy = "call it after optimizer.step(), before the next backward"
            raise RuntimeError(f"{call}() {moment}: {remedy}")
        if self.training.step.held:
            self.training.gather()

    def apply_pending(self, end_round: bool = True) -> None:
        """Apply what is deferred, and decide what waits to be decided."""
        self.flush()
        if end_round:
            self.training.end_round()
        if self.tuning is not None:
            self.tuning.drain()

    # - What is saved ------------------------------------------------------------------

    def state_dict(self, world_size: int | None, shards: int | None) -> StateDict:
        """As `Replica.state_dict`."""
        self.flush()
        saving.refuse_held(self.training)
        self.training.note_skipped()
        how = self.training, lambda: self.scheme, self._choosing()
        return saving.save(*how, world_size, shards)

    def load_state_dict(
        self, saved: Mapping[str, Any], beside: saving.Beside | None = None
    ) -> None:
        """As `Replica.load_state_dict`, with what is loaded `beside` it; collective."""
        if self.waiting:
            raise RuntimeError(
                f"load_state_dict() while {self.scheme!r} waits for the optimizer: "
                "call attach(optimizer) before, on every rank"
            )
        how = self.training, lambda: self.scheme, self._choosing()
        saving.load(*how, saved, beside)

    def _choosing(self) -> list[Saved]:
        """What is saved by those that choose a scheme, or cut buckets anew."""
        return [one for one in (self.auto, self.tuning) if one is not None]

    # - The end ------------------------------------------------------------------------

    def remove(self, end_round: bool) -> None:
        """Apply what is deferred, and detach; collective, and nothing a second time."""
        if self.removed:
            return
        self.meet()
        self.training.gather()
        self.apply_pending(end_round)
        self.detach()
        self.finder.rest()
        self._shared_buffers.rest()
        self.engine.transport.close()
        if self.regrouping is not None:
            self.regrouping.close()
        self.removed = True

    def detach(self) -> None:
        """Take the hooks from module and optimizer, when nothing is on its way."""
        if self.training.actions.chosen.apart:
            own_state.note(self.optimizer)
        if self.auto is not None:
            self.auto.remove()
        if self.kfac is not None:
            self.kfac.finish()
            self.kfac.close()
        self._admitted.remove()
        self.hooks.remove()


def accumulates(session: Session) -> bool:
    """Whether the program is inside `no_sync`.

    A wrapper's training is quiet from a forward inside until the next forward.
    """
    wrapper = getattr(session.owner, "wrapper", None)
    model = None if wrapper is None else wrapper()
    exchanges = getattr(model, "require_backward_grad_sync", False)
    return session.training.quiet and not exchanges


def moment_of(session: Session) -> str | None:
    """Where a step stands, as `Training.moment`; also inside `no_sync`."""
    if accumulates(session):
        return "inside no_sync()"
    return session.training.moment()


def find(session: Session) -> bool:
    """Attach the optimizer, if it is not known and all ranks have one by now.

    A collective call. Returns whether it did.
    """
    if session.known_optimizer is not None:
        return False
    known = session.finder.known() if moment_of(session) is None else []
    inner = {id(held) for optimizer in known for held in holds(optimizer)}
    inner.add(id(session.optimizer))
    found = [optimizer for optimizer in known if id(optimizer) not in inner]
    alone = all(session.engine.transport.gather_objects(len(found) == 1))
    if alone:
        session.attach(found[0])
    return alone
