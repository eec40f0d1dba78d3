"""The optimizer's own steps in the place of gradients.

[Note: local steps] Every rank steps from its own gradients. What then travels, and is
left behind in part, is what the step did to the parameters:

    shared = parameters that all ranks have alike; own = what this rank has undelivered
    training forward and backward at shared + own / P, with the rank's own batch
    step():  own += gain * what the optimizer changed;  mean, own = exchange(own)
             shared += mean

so a rank does not repeat, at old parameters, a step that it has made and not yet been
able to send: with one entry in a hundred on its way that is what costs gradients that
are left behind their convergence. It goes ahead by what its own steps will come to in
the mean; what the other ranks will add it does not know. That models may move apart by
what is undelivered is from CSER (Xie et al., NeurIPS 2020).

[Note: gain] Adam divides by the root of the mean square of what it sees. Of a rank's
own batch that is mostly noise, which in a mean over P ranks is smaller by the root of
P: so much shorter are the steps, and `gain` makes up for it. It is 1 for optimizers
that do not divide. What they remember of averaged gradients, when a warm-up ends, is
too small for a rank's own by the same token, and is made larger once.

Outside of training forwards, their backwards and the step, the module holds `shared`.

In the dense steps of a warm-up gradients are exchanged, as by any schedule: the mean of
steps costs as much to send, and learns worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import (
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from gradtide.alarm import refusal
from gradtide.bucket import Collective
from gradtide.collectives.warmup import Warmup
from gradtide.engine import Engine
from gradtide.layout import GradientBucket
from gradtide.ops import AllReduce
from gradtide.placement import Placement

# Whose steps are as long for gradients ten times as large.
DIVIDING = (Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop)
# What they remember of squares of gradients.
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "row_var", "col_var")


class LocalSteps:
    """The exchange of steps, and where the module's parameters stand meanwhile."""

    def __init__(
        self, engine: Engine, placement: Placement, optimizer: Optimizer
    ) -> None:
        self._engine, self._placement = engine, placement
        self._optimizer = optimizer
        size = engine.transport.group.size
        self._gain = math.sqrt(size) if isinstance(optimizer, DIVIDING) else 1.0
        self._ahead = 1 / size
        self.on = False  # steps are exchanged; not in the dense steps of a warm-up
        self._shared: dict[GradientBucket, list[Tensor]] = {}  # memory, by bucket
        self._away = False  # it holds what all share, the module something else
        self._led = False  # the module went ahead before the step
        self._alarmed: list[int] = []  # ranks with a gradient that is not finite
        self._culprit: str | None = None  # this rank's, by name
        self.decide()

    @torch.no_grad()
    def decide(self) -> None:
        """A forward or a backward begins: is it for steps or for gradients?"""
        (own, state), before = self._collective(), self.on
        self.on = not (isinstance(own, Warmup) and own.dense_next(state))
        if self.on and not before:
            self._part()

    def _collective(self) -> tuple[Collective, dict[str, Tensor]]:
        """What exchanges the first bucket, and its memory; the others are as far."""
        bucket = self._placement.buckets[0].bucket
        return bucket.collective, bucket.load.state

    def _part(self) -> None:
        """Let no gradient live in a bucket any more: steps are left behind there."""
        for home in self._placement.buckets:
            begin, end = home.bucket.load.flat.data_ptr(), home.bucket.load.flat.nbytes
            for slot in home.slots:
                grad = slot.param.grad
                if grad is not None and 0 <= grad.data_ptr() - begin < end:
                    slot.param.grad = grad.clone()

    # - The module's parameters --------------------------------------------------------

    @torch.no_grad()
    def lead(self) -> None:
        """A training forward begins: go ahead by a share of what is undelivered."""
        self.decide()
        if self._away or not self.on:
            return
        self._keep()
        self._led = True
        for home in self._placement.buckets:
            if not home.clean:
                params, views = _params(home), list(home.views)
                torch._foreach_add_(params, views, alpha=self._ahead)

    @torch.no_grad()
    def withdraw(self) -> None:
        """Have the module hold what all ranks share; local."""
        if self._away:
            for home in self._placement.buckets:
                torch._foreach_copy_(_params(home), self._shared[home])
        self._away = self._led = False

    def _keep(self) -> None:
        buckets, self._away = self._placement.buckets, True
        if self._shared.keys() != set(buckets):  # they were cut anew
            self._shared = {home: _memory(home) for home in buckets}
        for home in buckets:
            torch._foreach_copy_(self._shared[home], _params(home))

    # - A step -------------------------------------------------------------------------

    @torch.no_grad()
    def check(self) -> None:
        """After backward: all ranks learn of gradients that are not finite.

        One that has none such marks its own, so that a GradScaler skips everywhere.
        """
        slots = [slot for home in self._placement.buckets for slot in home.slots]
        grads = {
            s.name: s.param.grad
            for s in slots
            if s.param.grad is not None and s.param.numel()
        }
        self._culprit = _not_finite(grads)
        rank, size = self._engine.transport.group
        flags = torch.zeros(size, dtype=torch.int32)
        flags[rank] = self._culprit is not None
        counts = self._engine.ask("finite", AllReduce(flags))().tolist()
        self._alarmed = [rank for rank, count in enumerate(counts) if count]
        if self._alarmed and self._culprit is None:
            for grad in list(grads.values())[:1]:
                grad[(0,) * grad.dim()] = math.nan

    @torch.no_grad()
    def stepping(self) -> None:
        """The optimizer's step begins.

        Raises RuntimeError for a step that would destroy the model.
        """
        alarmed, self._alarmed = self._alarmed, []
        if alarmed:
            self.withdraw()
            raise refusal(self._engine.transport, alarmed, self._culprit)
        own, state = self._collective()
        if isinstance(own, Warmup) and own.dense_last(state):
            self._widen()
        if not self._away:
            self._keep()

    def _widen(self) -> None:
        """Have the optimizer expect a rank's own gradients, see [Note: gain]."""
        for home in self._placement.buckets:
            for slot in home.slots:
                memory = self._optimizer.state.get(slot.param, {})
                for name in SQUARES:
                    if isinstance(memory.get(name), Tensor):
                        memory[name].mul_(self._gain**2)

    @torch.no_grad()
    def stepped(self) -> None:
        """The optimizer's step is over: exchange what it did."""
        buckets = self._placement.buckets
        for home in buckets:
            self._offer(home)
            self._engine.launch(home.bucket)
        self._away = self._led = False
        for home in buckets:
            self._engine.finish(home.bucket)
            torch._foreach_add_(_params(home), list(home.gradients()))

    def _offer(self, home: GradientBucket) -> None:
        """Move what is new from the module to the bucket, with what is undelivered."""
        flat, views = home.bucket.load.flat, list(home.views)
        if home.clean:
            flat.zero_()
        elif self._led:  # the rest is in the parameters
            flat.mul_(1 - self._gain * self._ahead)
        params, shared = _params(home), self._shared[home]
        torch._foreach_sub_(params, shared)
        torch._foreach_add_(views, params, alpha=self._gain)
        torch._foreach_copy_(params, shared)


def _params(home: GradientBucket) -> list[Tensor]:
    return [slot.param for slot in home.slots]


def _memory(home: GradientBucket) -> list[Tensor]:
    return [torch.empty_like(p) for p in _params(home)]


def _not_finite(grads: Mapping[str, Tensor]) -> str | None:
    """The name of a gradient that is infinite or NaN; waits for the device once."""
    if not grads:
        return None
    norms = torch._foreach_norm(list(grads.values()), math.inf)
    where = norms[0].device
    largest = torch.stack([norm.to(where, torch.float64) for norm in norms]).tolist()
    found = zip(grads, map(math.isfinite, largest), strict=True)
    return next((name for name, finite in found if not finite), None)
