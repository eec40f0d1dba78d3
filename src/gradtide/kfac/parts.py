"""What a preconditioner is made of: here for a model in training.

A planner has other parts, which take time and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from gradtide.kfac import distributions
from gradtide.kfac.assign import Assignment
from gradtide.kfac.config import KFAC
from gradtide.kfac.costs import Carried, Costs
from gradtide.kfac.curvature import Curvature
from gradtide.kfac.flows import Piece, Share
from gradtide.kfac.layers import Kind, Layer
from gradtide.kfac.statistics import Ready, Statistics, batch, tokens
from gradtide.kfac.timing import estimate_inverses
from gradtide.kfac.worker import Worker
from gradtide.ops import Group

SAMPLES = {"batch": batch, "tokens": tokens}


class Parts(Protocol):
    """All that computes, who does it, and how results are handed out.

    What travels when, and what together, is decided elsewhere.
    """

    @property
    def worker(self) -> Worker: ...

    def inverses(self, dims: Sequence[int]) -> dict[int, float]:
        """Seconds of inversions by rows."""
        ...

    def assignment(
        self,
        config: KFAC,
        layers: Sequence[Layer],
        size: int,
        known: Costs,
        carried: Carried,
    ) -> Assignment:
        """Who owns what, and what travels together: see `distributions.assignment`."""
        ...

    def statistics(self, layers: Sequence[Layer], ready: Ready) -> Statistics: ...

    def curvature(self, layer: Layer, kinds: Sequence[Kind]) -> Curvature: ...

    def share(
        self,
        pieces: Sequence[Piece],
        group: Group,
        make: Callable[[], None],
        take: Callable[[], None],
    ) -> Share: ...


class Trained:
    """The parts for a model in training; `scale` as `Statistics` has it."""

    assignment = staticmethod(distributions.assignment)

    def __init__(
        self,
        model: nn.Module,
        config: KFAC,
        device: torch.device,
        scale: Callable[[], float] | None,
    ) -> None:
        self._model, self._config, self._device = model, config, device
        self._scale, self.worker = scale, Worker(device)

    def inverses(self, dims: Sequence[int]) -> dict[int, float]:
        return estimate_inverses(dims, self._device, self._config.form)

    def statistics(self, layers: Sequence[Layer], ready: Ready) -> Statistics:
        samples = SAMPLES[self._config.samples]
        return Statistics(
            self._model, layers, ready, samples=samples, scale=self._scale
        )

    def curvature(self, layer: Layer, kinds: Sequence[Kind]) -> Curvature:
        return Curvature(layer, self._config, kinds)

    def share(
        self,
        pieces: Sequence[Piece],
        group: Group,
        make: Callable[[], None],
        take: Callable[[], None],
    ) -> Share:
        return Share(pieces, group, self._device, make, take)
