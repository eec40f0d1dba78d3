"""Where inversions run: beside the training thread and the lane, or on the lane."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gradtide.kfac.layers import Layer


class Worker:
    """Runs one job at a time for each layer, in the order of submission.

    On a CPU on a thread of its own. A device queues work itself: there a job runs at
    once, on the stream of whoever submits it.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0  # that jobs took
        self._pool = ThreadPoolExecutor(1, "kfac") if device.type == "cpu" else None
        self._jobs: dict[Layer, Future[None]] = {}

    def submit(self, layer: Layer, job: Callable[[], None]) -> None:
        if self._pool is None:
            self._run(job)
        else:
            self._jobs[layer] = self._pool.submit(self._run, job)

    def wait(self, layer: Layer) -> None:
        """Until the layer's last job is done; raises what it raised."""
        if layer in self._jobs:
            self._jobs[layer].result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _run(self, job: Callable[[], None]) -> None:
        start = time.perf_counter()
        job()
        self.seconds += time.perf_counter() - start
