"""What K-FAC costs a rank's processor: inversions, and products of matrices."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import torch

from gradtide.kfac.timing import InverseTime, time_inverses
from gradtide.plan.device import Device, Line

DIMS = (16, 64, 256, 512, 1024)  # rows
REPEATS = 5


def with_curvature(known: Device, device: torch.device) -> Device:
    """`known` with the times of inversions and products on `device`.

    Called by all ranks at once, as they share cores in training.
    """
    slow = _product(device, DIMS[-1])
    fast = _product(device, DIMS[0])
    each = slow / DIMS[-1] ** 3
    return replace(
        known,
        inverse=InverseTime.fit(time_inverses(DIMS, device)),
        product=Line(max(fast - each * DIMS[0] ** 3, 0.0), each),
        beside=device.type == "cpu",
    )


def _product(device: torch.device, rows: int) -> float:
    """Median seconds of a product of two square matrices."""
    a, seconds = torch.rand(rows, rows, device=device), []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])
