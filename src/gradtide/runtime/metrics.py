"""Numbers of a rank's training, counted since they were last asked for."""

from __future__ import annotations

import math

import torch

from gradtide.core.engine import Engine
from gradtide.runtime.deferred.partial_norms import squares
from gradtide.runtime.layout.buckets import FLAT
from gradtide.runtime.training import Training


class Metrics:
    """What `Replica.metrics` returns; it reads counters, and no tensors."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._density, self._compressed = engine, 0.0, 0.0
        self._counted = self._totals()

    def read(self, training: Training) -> dict[str, float]:
        """The numbers, of what has happened since the call before."""
        before, self._counted = self._counted, self._totals()
        new = {name: total - before[name] for name, total in self._counted.items()}
        selected, offered = new.pop("selected"), new.pop("offered")
        if offered:
            self._density = selected / offered
        dense, compressed = new.pop("dense_bytes"), new.pop("compressed_bytes")
        if dense:
            self._compressed = compressed / dense
        return {
            "step": training.num_steps,
            **new,
            "density": self._density,
            "compressed_share": self._compressed,
            "skipped_steps": training.num_skipped,
        }

    def _totals(self) -> dict[str, float]:
        """All that was counted so far."""
        sent = self._engine.sent_bytes
        return {**self._engine.telemetry.totals(), "sent_bytes": sent}


@torch.no_grad()
def residual_norms(training: Training) -> dict[str, float]:
    """2-norms of this rank's residual, and of what of it waits.

    Applies what is deferred first; RuntimeError while gradients are on their way.
    """
    step = training.step
    if step.open or step.held:
        raise RuntimeError(
            "metrics(residual=True) between backward and step, while gradients are "
            "on their way: call it after optimizer.step()"
        )
    training.flush()
    training.arrive()
    buckets = training.placement.buckets
    left = (b.payload.flat for b in buckets if not b.residual_empty)
    aside = (p[FLAT] for b in buckets for p in b.waiting.values() if FLAT in p)
    own, waiting = (sum(float(squares([x])) for x in xs) for xs in (left, aside))
    return {
        "residual_norm": math.sqrt(own + waiting),
        "waiting_norm": math.sqrt(waiting),
    }
