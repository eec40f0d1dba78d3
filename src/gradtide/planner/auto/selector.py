"""The scheme `auto`: profile the first steps, plan, and switch.

Training begins as `wfbp`. After some steps every rank hands in the times of its own,
all measure the network together, rank 0 plans, and everybody follows. Whatever is
raised on the way, on whichever rank, leaves all ranks where they are (`decision`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.core.schedule import DEAR
from gradtide.core.torch_internals.autograd import Hook
from gradtide.planner.auto.decision import LOG, Decision, Seen, decide, stay
from gradtide.planner.auto.inspector import LoopInspector
from gradtide.planner.watch import Watch
from gradtide.runtime.guards.validation import validate_optimizer
from gradtide.scheme import Auto, Scheme, parse, undecided

SETTLED = 2  # steps after which buckets follow the real order


class Replicated(Protocol):
    """What is planned for: a replica."""

    model: nn.Module
    optimizer: Optimizer
    engine: Engine
    scheme: Scheme

    def adopt(self, scheme: str | Scheme) -> None: ...


class AutoSelector:
    """Profiles the first steps of a replica that is undecided, and decides.

    Between `optimizer.step()` and the next forward, where nothing is on its way.
    """

    def __init__(self, replica: Replicated, auto: Auto) -> None:
        self._replica, self._auto, self._steps = replica, auto, 0
        self._asked = replica.scheme
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
            self._follow(decide(transport, self._auto, self._see, device))

    def _see(self) -> Seen:
        trace = self._watch.trace(type(self._replica.model).__name__)
        return Seen(trace, self._obstacle())

    def _obstacle(self) -> str:
        """Why updates cannot be deferred; empty where they can."""
        if not self._auto.deferred:
            return "deferred updates are not wanted"
        try:
            validate_optimizer(self._replica.model, self._replica.optimizer, DEAR)
        except ValueError as error:
            return str(error)
        return self.inspector.obstacle

    def _follow(self, decision: Decision) -> None:
        try:
            self._replica.adopt(decision.scheme)
        except ValueError as error:  # on every rank: see Replica.adopt
            decision = stay(f"cannot adopt {decision.scheme!r}: {error}")
            self._replica.adopt(decision.scheme)
        if self._replica.engine.transport.group.rank != 0:
            return
        if decision.failed:
            LOG.warning("auto: stays with wfbp: %s", decision.words)
        else:
            LOG.info("auto: %s", decision.words)
