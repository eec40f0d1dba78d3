"""Means of gradients: what `wfbp`, `dear` and every scheme without steps exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from gradtide.core.payload import traits
from gradtide.core.step import Stage
from gradtide.core.torch_internals import record_function
from gradtide.runtime.checkpoint import Saved
from gradtide.runtime.deferred.updates import Updates
from gradtide.runtime.exchange import Surroundings
from gradtide.runtime.exchange.unpreconditioned import Unpreconditioned
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.optimizer.momentum import Momentum
from gradtide.scheme import Scheme, takes_momentum_over

if TYPE_CHECKING:  # loads K-FAC
    from gradtide.runtime.exchange.preconditioned import Preconditioning


class GradientExchange:
    """The exchange of gradients.

    With K-FAC (`stage`) means are preconditioned before the optimizer has them.
    """

    eager, apart = True, False
    saved: Sequence[Saved] = ()

    def __init__(
        self,
        around: Surroundings,
        scheme: Scheme,
        updates: Updates,
        stage: Preconditioning | Unpreconditioned,
    ) -> None:
        self._engine, self._placement = around.engine, around.placement
        self._optimizer, self._updates = around.optimizer, updates
        self._stage = stage
        self._momentum = momentum_of(around.optimizer, scheme)

    def adopt(self, scheme: Scheme) -> None:
        """Go on with another scheme; ValueError if the optimizer can't."""
        self._momentum = momentum_of(self._optimizer, scheme)

    def now(self) -> GradientExchange:
        return self

    def next(self) -> GradientExchange:
        return self

    def fill(self, bucket: Any) -> None:
        if not bucket.keeps:  # one of K-FAC's factors
            self._stage.leave(bucket)
            return
        bucket.momentum_applied = False
        if self._momentum is not None:
            # Alone nothing is selected, and the optimizer can do it itself.
            alone = self._engine.group.size == 1
            bucket.use_momentum(*((0.0, 1.0) if alone else self._momentum.now()))
        bucket.copy_in()
        if self._engine.undoes:
            bucket.keep(self._engine, traits(bucket.collective).residual)

    def launch(self, bucket: Any, hold: bool) -> None:
        bucket.launch(self._engine, hold)

    def finish(self, bucket: GradientBucket) -> None:
        bucket.finish(self._engine)

    def agree(self, leaving: int | None) -> None:
        self._stage.collect()

    def before_update(self, fresh: bool) -> None:
        if not fresh:
            return
        buckets = self._placement.buckets
        if self._momentum is not None and any(b.momentum_applied for b in buckets):
            self._momentum.take()
        self._stage.precondition(self._optimizer)

    def after_update(self) -> None:
        if self._momentum is not None:
            self._momentum.give_back()
        if self._engine.undoes:
            self._settle(b for b in self._placement.buckets if b.stage is Stage.IDLE)

    def _settle(self, buckets: Iterable[GradientBucket]) -> None:
        for bucket in buckets:
            bucket.settle(self._engine)

    def left(self) -> None: ...

    def close(self, leave: Callable[[], None]) -> None: ...

    def take_buffers(self) -> bool:
        return True

    def shared_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def apply(self, buckets: Sequence[GradientBucket]) -> None:
        for bucket in buckets:
            self._stage.update(bucket)
        start = self._engine.clock()
        with record_function(f"gradtide::{buckets[0].name}::apply"):
            self._updates.apply(buckets)
        if self._engine.undoes:
            self._settle(buckets)
        self._engine.telemetry.applied.append((start, self._engine.clock()))


def momentum_of(optimizer: Optimizer, scheme: Scheme) -> Momentum | None:
    """The optimizer's momentum, if the scheme takes it over; ValueError if it can't."""
    return Momentum(optimizer) if takes_momentum_over(scheme) else None
