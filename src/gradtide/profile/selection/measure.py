"""Times of selectors at work: accumulate, select, take out, round after round.

[Note: steady state] Each selector has a residual of its own, to which every round adds
a fresh gradient. Such a residual does a random walk until it is selected and begins
again at zero. Under a threshold T walks of step s end at a rate of s^2 / T^2, and in
the steady state residual / T is distributed like the difference of two uniform numbers.
So the residuals need not be walked for 1 / density rounds: they are drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean

import torch
from torch import Tensor

from gradtide.core.payload import Payload
from gradtide.selectors import Selector

TOPK, COPY = "torch.topk", "copy"  # the yardsticks, beside the selectors' names
LAYER = 1 << 14  # elements of one scale: gradients differ between layers
SPREAD = 0.5  # standard deviation of the logarithm of these scales
SHIFTS = 1 << 8  # gradients to draw from
WARMUP = 10  # rounds in which thresholds settle
LEAST = 2  # timed rounds of what takes longer than the time it has

Round = Callable[[Tensor], int]  # gradient in, number of selected entries out


@dataclass(frozen=True)
class Timing:
    """Each timed round's seconds, on the wall and of CPU, and number of entries."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def count(self) -> float:
        return mean(self.counts)


class Gradients:
    """An endless supply of gradients of `n` elements, (1-D, float32), at no cost.

    All are views into one pool, each begins elsewhere: every element gets a fresh value
    of about the same scale.
    """

    def __init__(self, n: int, device: torch.device, seed: int = 0) -> None:
        self.n = n
        self.rng = torch.Generator(device).manual_seed(seed)
        size = n + 16 * SHIFTS
        layers = torch.randn(-(-size // LAYER), generator=self.rng, device=device)
        self.pool = torch.randn(size, generator=self.rng, device=device)
        scales = layers.mul(SPREAD).exp().tolist()
        for scale, part in zip(scales, torch.split(self.pool, LAYER), strict=True):
            part.mul_(scale)

    def draw(self) -> Tensor:
        shift = torch.randint(SHIFTS, (), generator=self.rng, device=self.pool.device)
        begin = 16 * int(shift)  # whole cache lines
        return self.pool[begin : begin + self.n]

    def residual(self, density: float) -> Tensor:
        """What selection of this density leaves; see [Note: steady state]."""
        threshold = float(self.pool.norm()) / math.sqrt(len(self.pool) * density)
        return self._walked * threshold

    @cached_property
    def _walked(self) -> Tensor:
        x = torch.rand(self.n, generator=self.rng, device=self.pool.device)
        return x.sub_(torch.rand(self.n, generator=self.rng, device=self.pool.device))


def measure(
    gradients: Gradients,
    density: float,
    selectors: Mapping[str, Selector],
    repeats: int,
    seconds: float,
) -> dict[str, Timing]:
    """Timings by name, of the selectors and the yardsticks; all take turns.

    At most `repeats` rounds, about `seconds` for each.
    """
    k = max(1, round(density * gradients.n))
    start = gradients.residual(density)
    rounds = {name: _at_work(s, k, start.clone()) for name, s in selectors.items()}
    rounds[TOPK] = lambda x: len(torch.topk(x.abs(), k, sorted=False).indices)
    rounds[COPY] = lambda gradient: len(start.copy_(gradient))
    _alternate(rounds, gradients, WARMUP, seconds / 3, least=1)
    return _alternate(rounds, gradients, repeats, seconds, LEAST)


def _at_work(selector: Selector, k: int, flat: Tensor) -> Round:
    payload = Payload(flat, [flat])

    def work(gradient: Tensor) -> int:
        flat.add_(gradient)
        where = selector(flat, k, payload.state)
        payload.pop_entries(where)
        return len(where)

    return work


def _alternate(
    rounds: Mapping[str, Round],
    gradients: Gradients,
    repeats: int,
    budget: float,
    least: int,
) -> dict[str, Timing]:
    """Rounds of all in turn, until repeats or seconds are out.

    Each has its first `least` rounds (if as many repeats are asked) whatever they take.
    """
    found = {name: Timing() for name in rounds}
    for turn in range(repeats):
        gradient = gradients.draw()
        for name, work in rounds.items():
            timing = found[name]
            if turn >= least and sum(timing.seconds) > budget:
                continue
            busy, begin = time.process_time(), _now(gradient)
            timing.counts.append(work(gradient))
            timing.seconds.append(_now(gradient) - begin)
            timing.cpu_seconds.append(time.process_time() - busy)
    return found


def _now(x: Tensor) -> float:
    """The time, when everything that was asked of the device of `x` is done."""
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
    return time.perf_counter()
