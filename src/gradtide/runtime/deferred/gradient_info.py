"""What is known of gradients between backward and step(), and how to have them.

All of them can be clipped by their 2-norm, deferred ones and those of shards too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from gradtide.core.grouped import alike
from gradtide.core.step import Stage, Step
from gradtide.core.torch_internals import foreach_mul_
from gradtide.runtime.deferred.grads import DeferredGrad
from gradtide.runtime.deferred.partial_norms import Scale, squares
from gradtide.runtime.deferred.tally import Tally
from gradtide.runtime.guards.nonfinite import NonFiniteGuard
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.placement import Placement
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.turns import Turns
from gradtide.transport.shards import Spread, local, spread

_EDITED = -1  # in the place of a number of writes
Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """A method of `GradientInfo` that any thread may call, one at a time.

    Where ranks may be lost, it tells nothing if its exchange fails.
    """

    @wraps(method)
    def taken(self: GradientInfo, *args: Any) -> Any:
        with self.turns:
            return self.surviving(method)(self, *args)

    return cast(Method, taken)


class SquaresGradients(Protocol):
    """K-FAC, as what is known of gradients depends on it."""

    def check_scale(self) -> None:
        """Raise RuntimeError if a GradScaler is at work that it was not told of."""


@dataclass(eq=False)
class GradientInfo:
    """The source of a replica's deferred gradients.

    K-FAC (`preconditioning`) works between the halves of their exchanges, so only all
    ranks together can have them before it.
    """

    turns: Turns
    _step: Step
    _placement: Placement
    _tally: Tally
    _guard: NonFiniteGuard
    _preconditioning: SquaresGradients | None
    # As `Training` has it.
    surviving: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call
    _versions: int | None = None  # of means that were asked for before step()
    _early: bool = False  # a norm was asked for that no rank had sent yet
    _warned: bool = False

    def begin(self) -> None:
        """The gradients of another backward are deferred."""
        self._versions, self._early = None, False

    def end(self) -> None:
        """What was delivered before step() is no longer deferred."""
        self._versions = None

    @in_turn
    def deliver(self) -> None:
        """Have all delivered that are held; they answer as before."""
        if self._step.held:
            self._step.gather()
            self._versions = self._count()

    @in_turn
    @torch.no_grad()
    def ensure_updated(
        self,
        buckets: Iterable[GradientBucket],
        along: Iterable[GradientBucket] = (),
    ) -> None:
        """Carry out the updates that are due of some buckets: somebody reads them.

        So are those of `along`, as far as their means are here.
        The trainer is told of gradients that are not finite, which takes a message of
        its own: others read what is there before, see [Note: readers] in `turns`.
        """
        due = [bucket for bucket in buckets if bucket.stage is Stage.DUE]
        if not due:
            return
        if not self.turns.trains:
            self._tally.learn()
            if self._guard.ranks:
                return
        self.turns.unwatched(lambda: self._step.apply(due, along))

    def read(self, p: nn.Parameter) -> None:
        """Somebody reads a parameter, whose update may be due."""
        place = self._placement.places.get(p)
        if place is not None:
            self.ensure_updated([place.bucket])

    # - For a deferred gradient --------------------------------------------------------

    def awaits(self, grad: DeferredGrad) -> bool:
        """Whether a step() is to come that will have it delivered."""
        return self._bucket(grad).stage is Stage.HELD or self._versions is not None

    @in_turn
    def have(self, grad: DeferredGrad) -> None:
        """Have the values delivered, of this one at least."""
        bucket = self._bucket(grad)
        if bucket.stage is not Stage.HELD:
            self.ensure_updated([bucket])
            return
        first = "K-FAC has" if self._preconditioning is not None else None
        if self._placement.divided:
            first = "the owners of matrices have"
        if first is not None:
            raise RuntimeError(
                f"the gradient of {grad.slot.name} is not here yet, and {first} to "
                "have it first: clip with sync.clip_grad_norm_(max_norm); read or edit "
                "gradients after sync.gather_gradients(), on every rank; or use a "
                "schedule that updates at step()"
            )
        if not self._warned and not self._early:
            self._warned = True
            warnings.warn(
                f"the gradient of {grad.slot.name} was read or edited before step(), "
                "so the second halves of this step's exchanges run now and do not hide "
                "in the next forward: 2-norms and scaling do not need that; clip with "
                "sync.clip_grad_norm_ or torch.nn.utils.clip_grad_norm_, or use a "
                "schedule that updates at step(), such as 'wfbp'",
                stacklevel=2,
            )
        self.deliver()

    @in_turn
    def edit(self, grad: DeferredGrad) -> None:
        """Have the values delivered, which are about to be changed."""
        self.have(grad)
        if self._versions is not None:
            self._versions = _EDITED

    @in_turn
    def scale(self, grad: DeferredGrad, function: Scale, by: Any) -> None:
        """Scale the values, which are here."""
        assert grad.value is not None
        known = self._versions == self._count()
        function(grad.value, by)
        if known:
            self._versions = self._count()

    @in_turn
    def square(self, grad: DeferredGrad) -> float | None:
        """The square of the 2-norm as exchanged; None if it is not known."""
        known = self._squares()
        if known is None or grad.before is not None:
            return None
        return known.get(grad.slot)

    @in_turn
    def finite(self, grads: Sequence[DeferredGrad]) -> bool | None:
        """Whether some are, on all ranks; None if that is not known."""
        if self._preconditioning is not None:
            self._preconditioning.check_scale()
        if self._squares() is None or any(g.before is not None for g in grads):
            return None
        kind = grads[0].dtype, grads[0].device
        bad = (
            self._tally.nonfinite[bucket]
            for bucket in self._placement.buckets
            if (bucket.payload.flat.dtype, bucket.payload.flat.device) == kind
        )
        return not any(bad) and not self._guard.ranks

    def zero(self, grad: DeferredGrad) -> None: ...

    # - Clipping -----------------------------------------------------------------------

    @in_turn
    @torch.no_grad()
    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Scale gradients to a 2-norm of at most `max_norm`; returns what it was."""
        self._tally.wished |= self._step.schedule.update == "forward"
        found = {p: p.grad for p in self._placement.places}
        grads = [(spread(p), local(g)) for p, g in found.items() if g is not None]
        known, shards = self._totals([*found.values()]), self._placement.shards
        kinds = alike(grad for _, grad in grads)
        where = grads[0][1].device if grads else torch.device("cpu")
        zero = total = torch.zeros((), dtype=torch.float64, device=where)
        for divided in shards.spreads:
            if known is None:
                here = alike(grad for how, grad in grads if how == divided)
                own = sum((squares(members).sum().to(where) for members in here), zero)
            else:
                own = zero + known.get(divided, 0.0)
            total = total + shards.total(own, divided)
        double = any(own[0].dtype in (torch.float64, torch.complex128) for own in kinds)
        norm = total.sqrt().to(torch.float64 if double else torch.float32)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the averaged gradients is {norm.item()}")
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # Only the host's value is free to read.
        if factor.is_cuda or float(factor) != 1.0:
            for members in kinds:
                foreach_mul_(members, factor.to(members[0].device))
        return norm

    def _totals(self, grads: Sequence[Tensor | None]) -> dict[Spread, float] | None:
        """The squares of the norms of all, known perhaps where no single one is.

        Those of what this rank has of them, by how their parameters are divided.
        """
        deferred = [grad for grad in grads if isinstance(grad, DeferredGrad)]
        if len(deferred) < len(grads) or self._squares() is None:
            return None
        if any(own.scales or own.zeroed or own.before is not None for own in deferred):
            return None
        if any(own.source is not self for own in deferred):  # of an earlier step
            return None
        totals: dict[Spread, float] = {}
        for bucket, square in self._tally.totals.items():
            totals[bucket.spread] = totals.get(bucket.spread, 0.0) + square
        return totals

    def _squares(self) -> dict[Slot, float] | None:
        """Those of norms that the ranks have sent, if these are still right."""
        self._tally.learn()
        if not self._step.held and self._versions != self._count():
            return None
        if self._tally.squares is None:
            self._tally.wished = self._early = True
        return self._tally.squares

    def _bucket(self, grad: DeferredGrad) -> GradientBucket:
        return self._placement.places[grad.slot.param].bucket

    def _count(self) -> int:
        """How often means were written to: whoever has a view of one may write."""
        means = (bucket.mean for bucket in self._placement.buckets)
        return sum(mean._version for mean in means if mean is not None)
