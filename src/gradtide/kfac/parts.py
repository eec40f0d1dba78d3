"""What a preconditioner is made of: here for a model in training.

A planner has other parts, which take time and compute nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn

from gradtide.kfac import distributions
from gradtide.kfac.assign import Assignment
from gradtide.kfac.config import KFAC
from gradtide.kfac.costs import estimate_inverses
from gradtide.kfac.curvature import Curvature
from gradtide.kfac.flows import Share
from gradtide.kfac.layers import Kind, Layer
from gradtide.kfac.samples import SAMPLES
from gradtide.kfac.statistics import Ready, Statistics


class Worker:
    """Runs one job at a time for each layer, in the order of submission.

    On a CPU on a thread of its own, beside the training thread and the queue. A device
    queues work itself: there a job runs at once, on the stream of whoever submits it.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0  # that jobs took
        self._pool = ThreadPoolExecutor(1, "kfac") if device.type == "cpu" else None
        self._jobs: dict[Layer, Future[None]] = {}

    def submit(self, layer: Layer, job: Callable[[], None]) -> None:
        def run() -> None:
            start = time.perf_counter()
            job()
            self.seconds += time.perf_counter() - start

        if self._pool is None:
            run()
        else:
            self._jobs[layer] = self._pool.submit(run)

    def wait(self, layer: Layer) -> None:
        """Until the layer's last job is done; raises what it raised."""
        if layer in self._jobs:
            self._jobs[layer].result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class Parts(Protocol):
    """All that computes, who does it, and how results are handed out.

    What travels when, and what together, is decided elsewhere.
    """

    worker: Worker

    @property
    def assignment(self) -> Callable[..., Assignment]: ...  # as in `distributions`

    @property
    def share(self) -> Callable[..., Share]: ...

    def inverses(self, dims: Sequence[int]) -> dict[int, float]:
        """Seconds of inversions by rows."""

    def statistics(self, layers: Sequence[Layer], ready: Ready) -> Statistics: ...

    def curvature(self, layer: Layer, kinds: Sequence[Kind]) -> Curvature: ...

    def told(self, numbers: Sequence[Tensor]) -> Sequence[Tensor]:
        """What ranks have told each other of layers, for `Curvature.average`."""


class Trained:
    """The parts for a model in training; `scale` as `Statistics` has it."""

    assignment, share = staticmethod(distributions.assignment), Share

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
        return Statistics(self._model, layers, ready, samples, self._scale)

    def curvature(self, layer: Layer, kinds: Sequence[Kind]) -> Curvature:
        return Curvature(layer, self._config, kinds)

    def told(self, numbers: Sequence[Tensor]) -> Sequence[Tensor]:
        """They are on the host, which waits for a device once, and not for each."""
        lengths = [len(each) for each in numbers]
        return torch.split(torch.cat([*numbers]).cpu(), lengths)
