"""What is known of gradients between backward and step(), and how to have them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradtide.core.step import Stage, Step
from gradtide.runtime.buckets import GradientBucket
from gradtide.runtime.deferred_grads import DeferredGrad, Scale
from gradtide.runtime.nonfinite import NonFiniteGuard
from gradtide.runtime.placement import Placement
from gradtide.runtime.tally import Tally
from gradtide.transport.shards import Spread

if TYPE_CHECKING:
    from gradtide.runtime.preconditioning import Preconditioning

_EDITED = -1  # in the place of a number of writes


class Answers:
    """The source of a replica's deferred gradients.

    K-FAC (`preconditioning`) works between the halves of their exchanges, so only all
    ranks together can have them before it.
    """

    def __init__(
        self,
        step: Step,
        placement: Placement,
        tally: Tally,
        guard: NonFiniteGuard,
        preconditioning: Preconditioning | None,
    ) -> None:
        self._step, self._placement, self._tally = step, placement, tally
        self._guard, self._preconditioning = guard, preconditioning
        self._versions: int | None = None  # of means that were asked for before step()
        self._early = False  # a norm was asked for that no rank had sent yet
        self._warned = False

    def begin(self) -> None:
        """The gradients of another backward are deferred."""
        self._versions, self._early = None, False

    def end(self) -> None:
        """What was delivered before step() is no longer deferred."""
        self._versions = None

    def deliver(self) -> None:
        """Have all delivered that are held; they answer as before."""
        if self._step.held:
            self._step.gather()
            self._versions = self._count()

    # - For a deferred gradient --------------------------------------------------------

    def awaits(self, grad: DeferredGrad) -> bool:
        return self._bucket(grad).stage is Stage.HELD or self._versions is not None

    def have(self, grad: DeferredGrad) -> None:
        bucket = self._bucket(grad)
        if bucket.stage is Stage.HELD:
            self._refuse(grad)
            self._warn(grad)
            self.deliver()
        else:
            self._step.apply(bucket)

    def edit(self, grad: DeferredGrad) -> None:
        self.have(grad)
        if self._versions is not None:
            self._versions = _EDITED

    def scale(self, grad: DeferredGrad, function: Scale, by: Any) -> None:
        assert grad.value is not None
        known = self._versions == self._count()
        function(grad.value, by)
        if known:
            self._versions = self._count()

    def square(self, grad: DeferredGrad) -> float | None:
        if not self._known():
            return None
        squares = self._tally.squares
        assert squares is not None
        return None if grad.before is not None else squares.get(grad.slot)

    def finite(self, grads: Sequence[DeferredGrad]) -> bool | None:
        if self._preconditioning is not None:
            self._preconditioning.check_scale()
        if not self._known():
            return None
        kind = grads[0].dtype, grads[0].device
        bad = (
            self._tally.nonfinite[bucket]
            for bucket in self._placement.buckets
            if (bucket.payload.flat.dtype, bucket.payload.flat.device) == kind
        )
        return not any(bad) and not self._guard.ranks

    # - For clipping -------------------------------------------------------------------

    def total(self, grads: Sequence[Tensor | None]) -> dict[Spread, float] | None:
        """The square of the norm of all, which may be known where no single one is.

        It is that of what this rank has of them, by how their parameters are divided.
        """
        if any(not isinstance(grad, DeferredGrad) for grad in grads):
            return None
        if not self._known() or any(map(_changed, grads)):
            return None
        squares: dict[Spread, float] = {}
        for bucket, square in self._tally.totals.items():
            squares[bucket.spread] = squares.get(bucket.spread, 0.0) + square
        return squares

    def _known(self) -> bool:
        """Whether the ranks have sent norms, and these are still right."""
        self._tally.learn()
        held = any(b.stage is Stage.HELD for b in self._placement.buckets)
        if not held and (self._versions is None or self._versions != self._count()):
            return False
        if self._tally.squares is None:
            self._tally.wished = self._early = True
            return False
        return True

    def _bucket(self, grad: DeferredGrad) -> GradientBucket:
        return self._placement.places[grad.slot.param].bucket

    def _count(self) -> int:
        """How often means were written to: whoever has a view of one may write."""
        means = (bucket.mean for bucket in self._placement.buckets)
        return sum(mean._version for mean in means if mean is not None)

    def _refuse(self, grad: DeferredGrad) -> None:
        if self._preconditioning is not None:
            raise RuntimeError(
                f"the gradient of {grad.slot.name} is not here yet, and K-FAC has to "
                "have it first: clip with sync.clip_grad_norm_(max_norm); read or edit "
                "gradients after sync.gather_gradients(), on every rank; or use a "
                "schedule that updates at step()"
            )

    def _warn(self, grad: DeferredGrad) -> None:
        if self._warned or self._early:
            return
        self._warned = True
        warnings.warn(
            f"the gradient of {grad.slot.name} was read or edited before step(), so "
            "the second halves of this step's exchanges run now and do not hide in the "
            "next forward: 2-norms and scaling do not need that; clip with "
            "sync.clip_grad_norm_ or torch.nn.utils.clip_grad_norm_, or use a schedule "
            "that updates at step(), such as 'wfbp'",
            stacklevel=2,
        )


def _changed(grad: Tensor | None) -> bool:
    assert isinstance(grad, DeferredGrad)
    return bool(grad.scales) or grad.zeroed or grad.before is not None
