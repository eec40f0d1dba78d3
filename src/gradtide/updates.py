"""What waits for the next forward where updates are deferred.

Between backward and step(), promises stand in the place of gradients. What step() would
have done is noted, and modules are watched that read what is not up to date.
Knows parameters and modules; nothing of exchanges, or of when anything happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradtide.autograd import Hook
from gradtide.deferred import DeferredStep
from gradtide.gradients import GradientBucket, Slot
from gradtide.placement import Placement, Watch
from gradtide.promise import Promise, Unscale
from gradtide.step import Stage


class Updates:
    """The promises, the noted step and the watch of one replica."""

    def __init__(self, placement: Placement, unscale: Unscale) -> None:
        self._placement, self._unscale = placement, unscale
        # In a list: a tensor's hash is slow for what runs once a parameter and step.
        self._promises: list[tuple[Slot, nn.Parameter, Promise]] = []
        self._step: DeferredStep | None = None
        self._watch: Watch | None = None

    def reset(self) -> None:
        """Buckets are cut anew; nothing is on its way."""
        self._promises, self._watch = [], None

    def watch(
        self, model: nn.Module, before_read: Callable[[nn.Module], None]
    ) -> list[Any]:
        """See the modules of `model` run; returns the hooks' handles."""
        self._watch = Watch(model, Hook(lambda module, _: before_read(module)))
        return self._watch.handles

    def promise(self) -> None:
        """Put promises in the place of gradients."""
        if not self._promises:  # by now the buckets are final
            self._promises = [
                (slot, slot.param, Promise.of(slot.param, self._unscale))
                for bucket in self._placement.buckets
                for slot in bucket.slots
            ]
        for _, p, promise in self._promises:
            promise.zeroed = False
            p.grad = promise

    def withdraw(self, dropped: bool) -> None:
        """Take promises back; RuntimeError if one is `dropped` that was not zeroed."""
        for _, p, promise in self._promises:
            # Not only where a mean replaces it: nobody may have used this one.
            if p.grad is promise:
                if dropped and not promise.zeroed:
                    raise RuntimeError(
                        "two backward passes before one step(): under a deferred "
                        "schedule all but the last belong inside sync.no_sync(); "
                        "or call sync.gather_gradients() between them"
                    )
                p.grad = None

    def note(self, optimizer: Optimizer) -> None:
        """Note what step() would do now, and to which parameters."""
        self._step = DeferredStep(optimizer)
        for slot, p, promise in self._promises:
            if p.grad is promise:
                slot.wanted = not promise.zeroed
                p.grad = None
            else:
                slot.wanted = False

    def expect(self) -> None:
        """Watch all modules that read what is now due."""
        if self._watch is not None:
            self._watch.on(self._placement.reads)

    def apply(self, bucket: GradientBucket) -> None:
        """Carry out the noted step for the parameters of a bucket."""
        assert self._step is not None
        updates = [(s.param, mean) for s, mean in bucket.delivered() if s.wanted]
        device = bucket.load.flat.device.type
        # As at step(): outside the forward's inference mode and autocast.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            aside = [p.grad for p, _ in updates]  # no_sync() may have begun anew
            for p, mean in updates:
                p.grad = mean
            self._step.apply((p for p, _ in updates), momentum=not bucket.moved)
            for (p, _), grad in zip(updates, aside, strict=True):
                p.grad = grad
        # Nothing that was up to date once this bucket was is watched any longer.
        reads = self._placement.reads
        self.rest(
            module
            for module in self._placement.readers[bucket]
            if len(reads[module]) == 1
            or not any(other.stage is Stage.DUE for other in reads[module])
        )

    def rest(self, modules: Iterable[nn.Module]) -> None:
        """Watch these modules no longer."""
        if self._watch is not None:
            self._watch.off(modules)
