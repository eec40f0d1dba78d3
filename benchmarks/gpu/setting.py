"""On what device, and how much of it; its clock, its memory, and waits for it."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradtide.lab.job import IDLE

AHEAD = 2_000_000  # cycles for which a device is held up: a millisecond


@dataclass(frozen=True)
class Setting:
    """Where figures are measured, and how long a section may take."""

    device: str = "cuda"
    tiny: bool = False  # a walk-through: sizes of which no time means anything
    seconds: float = 60.0

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(
        self, call: Callable[[], object], repeat: int = 20, warm: int = 3
    ) -> float:
        """The median of what a call takes a GPU when the host is ahead, as in training.

        Where the call waits for the device, what the host does then counts.
        """
        for _ in range(warm):
            call()
        self.synchronize()
        return statistics.median(self._once(call, AHEAD) for _ in range(repeat))

    def idle_milliseconds(self, call: Callable[[], object], repeat: int = 10) -> float:
        """The same from a GPU that has nothing to do: with what the host takes."""
        self.synchronize()
        return statistics.median(self._once(call, 0) for _ in range(repeat))

    def _once(self, call: Callable[[], object], ahead: int) -> float:
        if self.cuda:
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            if ahead:
                torch.cuda._sleep(ahead)  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end))
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def mean_milliseconds(
        self, call: Callable[[], object], repeat: int = 20, warm: int = 3
    ) -> float:
        """Of calls one after the other, of which none waits for the one before it.

        The median of three times so many.
        """
        for _ in range(warm):
            call()
        means = []
        for _ in range(3):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            self.synchronize()
            means.append(1e3 * (time.perf_counter() - start) / repeat)
        return statistics.median(means)

    def host_milliseconds(self, call: Callable[[], object], repeat: int = 5) -> float:
        """What the host takes to ask for a call, while it may run ahead."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        took = time.perf_counter() - start
        self.synchronize()
        return 1e3 * took / repeat

    def waits(self, call: Callable[[], object]) -> int | None:
        """How often a call has the host wait for the device, as far as torch sees it.

        It does not see what torch.distributed waits for.
        """
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(each.message) for each in seen)

    def copy_milliseconds(self, numel: int) -> float:
        """What a copy of so many floats takes, which reads and writes 8 bytes each."""
        x = torch.empty(numel, device=self.device).normal_()
        y = torch.empty_like(x)
        return self.milliseconds(lambda: y.copy_(x))

    def begin_peak(self) -> None:
        """What is no longer referred to is given back; the peak begins anew."""
        self.synchronize()
        time.sleep(IDLE)  # threads of a group, see [Note: Idle] of the lab
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Bytes that tensors had at most since then."""
        return torch.cuda.max_memory_allocated() if self.cuda else 0
