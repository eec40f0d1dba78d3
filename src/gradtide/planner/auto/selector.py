"""The scheme `auto`: profile the first steps, plan, and switch.

Training begins as `wfbp`. After some steps every rank hands in the times of its own,
all measure the network together, rank 0 plans, and everybody follows. Whatever is
raised on the way, on whichever rank, leaves all ranks where they are (`decision`).

Later on each rank looks whether its steps take longer or shorter for long (`drift`),
and says so in the message that ends a backward (`runtime.notices`). After the same step
all measure the network anew, and rank 0 plans with the times of the first steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from gradtide.collectives import Warmup
from gradtide.core.engine import Engine
from gradtide.core.schedule import DEAR, LOCAL, Schedule
from gradtide.core.torch_internals.autograd import Hook
from gradtide.planner.auto.decision import (
    LOG,
    Decision,
    Present,
    Seen,
    decide,
    stay,
)
from gradtide.planner.auto.drift import Drift
from gradtide.planner.auto.inspector import LoopInspector
from gradtide.planner.watch import Watch
from gradtide.runtime.guards.validation import validate_optimizer
from gradtide.runtime.notices import Heard, Notices
from gradtide.runtime.training import Training
from gradtide.scheme import RECIPES, Auto, Scheme, parse, undecided

SETTLED = 2  # steps after which buckets follow the real order


class Replicated(Protocol):
    """What is planned for: a replica."""

    model: nn.Module
    optimizer: Optimizer
    engine: Engine
    scheme: Scheme
    notices: Notices
    trained: Training

    @property
    def heard(self) -> Heard: ...

    def flush(self) -> None: ...

    def adopt(self, scheme: str | Scheme) -> None: ...


class AutoSelector:
    """Profiles the first steps of a replica that is undecided, and decides.

    Between `optimizer.step()` and the next forward, where nothing is on its way.
    """

    def __init__(self, replica: Replicated, auto: Auto) -> None:
        self._replica, self._auto, self._steps = replica, auto, 0
        self._asked = replica.scheme
        self._seen: Seen | None = None
        self._chosen: Scheme | None = None  # by this, while it is trained with
        self._drift = Drift()
        model, optimizer = replica.model, replica.optimizer
        self._watch = Watch(model, optimizer, auto.steps - SETTLED, SETTLED)
        self.inspector = LoopInspector(model, optimizer)
        # After the watch's own, which ends its last step.
        hook = optimizer.register_step_post_hook(lambda *_: self._stepped())
        # The optimizer goes through its hooks when all is decided: they are taken off
        # at the next forward.
        tidy = model.register_forward_pre_hook(Hook(lambda *_: self._tidy()))
        self._handles: list[Any] = [hook, tidy]

    @property
    def done(self) -> bool:
        """Whether there is a decision: by this, by a checkpoint, or by the user."""
        return self._replica.scheme is not self._asked

    def save(self, saved: dict[str, Any]) -> None:
        """The decision is the replica's scheme, which is saved already."""

    def blank(self, saved: dict[str, Any]) -> None: ...

    def read(self, saved: Mapping[str, Any]) -> str:
        """The scheme of a replica's state, if it is one for as many ranks."""
        alike = saved["world_size"] == self._replica.engine.transport.group.size
        return str(saved["scheme"]) if alike else ""

    def confirm(self, found: str) -> str:
        return found

    def load(self, found: str) -> None:
        """Follow the decision of a replica's state."""
        transport, text = self._replica.engine.transport, found
        if self.done or not text:
            return
        if undecided(parse(text)) is None:
            self._replica.adopt(text)
            if transport.group.rank == 0:
                LOG.info("auto: goes on as it was saved: %s", text)

    def remove(self) -> None:
        """Take all hooks off; not while the optimizer goes through them."""
        self._watch.remove()
        self.inspector.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _tidy(self) -> None:
        if self.done:
            self.remove()

    def _stepped(self) -> None:
        self._steps += 1
        if self._steps == self._auto.steps and not self.done:
            transport = self._replica.engine.transport
            device = next(self._replica.model.parameters()).device
            present = Present(self._replica.scheme, self._steps)
            self._follow(decide(transport, self._auto, self._see, device, present))

    def _see(self) -> Seen:
        if self._seen is None:
            trace = self._watch.trace(type(self._replica.model).__name__)
            deferred = self._obstacle(DEAR) or self.inspector.obstacle
            if not self._auto.deferred:
                deferred = "deferred updates are not wanted"
            self._seen = Seen(trace, deferred, self._obstacle(LOCAL))
        return self._seen

    def _obstacle(self, schedule: Schedule) -> str:
        """Why a schedule does not go with the optimizer; empty where it does."""
        try:
            scheme = Scheme(schedule=schedule)
            validate_optimizer(self._replica.model, self._replica.optimizer, scheme)
        except ValueError as error:
            return str(error)
        return ""

    def _follow(self, decision: Decision) -> None:
        try:
            self._replica.adopt(decision.scheme)
        except ValueError as error:  # on every rank: see Replica.adopt
            decision = stay(f"cannot adopt {decision.scheme!r}: {error}")
            self._replica.adopt(decision.scheme)
        self._told(decision)
        if not decision.failed and self._replica.engine.transport.group.size > 1:
            self._look_on()

    def _told(self, decision: Decision) -> None:
        if self._replica.engine.transport.group.rank != 0:
            return
        if decision.failed:
            LOG.warning("auto: stays with %s: %s", _name(decision), decision.words)
        else:
            LOG.info("auto: %s", decision.words)

    # - Later on -----------------------------------------------------------------------

    def _look_on(self) -> None:
        """From now on, look whether steps take as long as they did."""
        self._chosen = scheme = self._replica.scheme
        wrapper, breaks = scheme.collective, range(0)
        if isinstance(wrapper, Warmup):
            now, each = self._replica.trained.num_steps, wrapper.steps
            breaks = range(now + each, now + each * len(wrapper.densities) + 1, each)
        self._drift = Drift(scheme.schedule.every, breaks)

    def stepped(self, silent: bool) -> None:
        """A step is over, in which nothing has left if it was `silent` (hot path)."""
        if self._chosen is None or silent:
            return
        replica = self._replica
        if replica.scheme is not self._chosen:  # the user's, or a checkpoint's
            self._chosen = None
            replica.notices.decided()
            return
        self._drift.note(time.perf_counter(), replica.trained.num_steps)
        replica.notices.decide = self._drift.seen
        # Inside join() ranks that have run out of batches come here no more.
        if replica.heard.decide and not replica.trained.actions.members.inside:
            self._decide_anew()

    def _decide_anew(self) -> None:
        replica, before = self._replica, self._chosen
        assert before is not None
        replica.flush()
        present = Present(before, replica.trained.num_steps, chosen=True)
        device = next(replica.model.parameters()).device
        transport = replica.engine.transport
        decision = decide(transport, self._auto, self._see, device, present)
        replica.notices.decided()
        if decision.failed or decision.scheme == before:
            self._drift.look_later()
            self._told(replace(decision, scheme=before))
        else:
            self._follow(decision)


def _name(decision: Decision) -> str:
    """What is stayed with, as it is known."""
    known = (name for name, own in RECIPES.items() if own == decision.scheme)
    return next(known, repr(decision.scheme))
