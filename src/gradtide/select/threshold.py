"""Entries above a threshold that is remembered, and corrected by what it found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.select.follow import MEMORY, follow
from gradtide.select.kernels import everything


@dataclass(frozen=True)
class Threshold:
    """Entries above a remembered threshold: one pass over memory.

    Starts from a random sample, and is re-used and adapted between samples like
    Ok-Topk's (Li and Hoefler, PPoPP 2022, arXiv:2201.07598). But the correction is
    proportional to what is missing, on the scale that the data sets; a sample is drawn
    when the count is far off, in the same call, and not by the clock.
    """

    gain: float = 0.5  # share of an error that the next threshold makes good
    sample: int = 256  # sampled entries above the threshold: more, and a truer start

    def __post_init__(self) -> None:
        if not 0 < self.gain <= 1:
            raise ValueError(f"Threshold(gain={self.gain}): choose 0 < gain <= 1")
        if self.sample < 16:
            raise ValueError(f"Threshold(sample={self.sample}): choose at least 16")

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        k = max(k, 1)
        if k >= x.numel():
            return everything(x)
        fresh = torch.zeros(MEMORY, dtype=torch.float64)
        memory = state.setdefault("threshold", fresh)
        return follow(x, k, memory, self.gain, self.sample)
