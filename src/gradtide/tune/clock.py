"""The seconds of a training step, on the host or on its device."""

from __future__ import annotations

import time

import torch


class Clock:
    """Laps of a training thread.

    Where work is only queued, on an accelerator, times are those of the device, and
    known one lap later: nothing waits for the step that was just queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.Event | float] = []

    def reset(self) -> None:
        """Begin the first lap now."""
        self._marks = [self._mark()]

    def lap(self) -> float | None:
        """End a lap; the seconds of the last one that is known, once there is one."""
        self._marks.append(self._mark())
        if self._device.type == "cpu":
            begin, end = self._marks
            self._marks = [end]
            return float(end) - float(begin)  # type: ignore[arg-type]
        if len(self._marks) < 3:
            return None
        begin, end, _ = self._marks
        self._marks.pop(0)
        end.synchronize()  # type: ignore[union-attr]
        return begin.elapsed_time(end) / 1000  # type: ignore[union-attr, arg-type]

    def _mark(self) -> torch.Event | float:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
