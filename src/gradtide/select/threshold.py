"""Entries above a threshold that is remembered, and corrected by what it found."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.select.kernels import above, everything

SLACK = 16  # entries by which small counts may be off without alarm


@dataclass(frozen=True)
class Threshold:
    """Entries above a remembered threshold: one pass over memory.

    The threshold starts from a random sample. After each call it is moved so that, with
    the tail's slope seen in the sample, the next count would be the asked one; `gain`
    is the share of that move that is made. When fewer than half as many as asked are
    found, or more than 1.5 times as many, a sample is drawn afresh in the same call.

    Between samples like Ok-Topk (Li and Hoefler, PPoPP 2022, arXiv:2201.07598), but the
    correction is proportional to what is missing, on a scale that the data sets.
    """

    gain: float = 0.5
    sample: int = 256  # sampled entries above the threshold: more, and a truer start

    def __post_init__(self) -> None:
        if not 0 < self.gain <= 1:
            raise ValueError(f"Threshold(gain={self.gain}): 0 < gain <= 1")
        if self.sample < 8:
            raise ValueError(f"Threshold(sample={self.sample}): sample at least 8")

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        n, k = x.numel(), max(k, 1)
        if k >= n:
            return everything(x)
        memory = state.setdefault("threshold", torch.zeros(3, dtype=torch.float64))
        threshold, slope, step = memory.tolist()
        limit = k + k // 2 + SLACK
        found = above(x, threshold, limit) if threshold > 0 else None
        if found is None or not max(1, k / 2 - SLACK) <= len(found) < limit:
            threshold, slope = estimate(x, k, self.sample, seed=int(step))
            found = above(x, threshold, limit)
            if len(found) < k / 2:
                found = _with_ties(x, k, threshold, found)
            elif len(found) == limit:
                found = found[:k]
        move = self.gain / slope * math.log(max(len(found), 1) / k)
        threshold *= math.exp(min(max(move, -1.0), 1.0))
        memory.copy_(torch.tensor([threshold, slope, step + 1]))
        return found


def estimate(x: Tensor, k: int, hits: int, seed: int) -> tuple[float, float]:
    """A threshold that about `k` of |x| are above, and the slope of the tail there.

    Both come from a random sample of `x` in which about `hits` are above it. The slope
    is -d log(count) / d log(threshold).
    """
    n = x.numel()
    size = min(n, -(-n * hits // k), 1 << 20)
    if size < n:
        rng = torch.Generator(x.device).manual_seed(seed)
        x = x[torch.randint(n, (size,), generator=rng, device=x.device)]
    rank = max(1, round(size * k / n))
    further = min(size, 2 * rank)
    top = torch.topk(x.abs().nan_to_num(math.inf, math.inf), further).values
    high, low = top[[rank - 1, further - 1]].tolist()
    if not 0 < low < high < math.inf:
        return high, 4.0
    slope = math.log(further / rank) / math.log(high / low)
    return high, min(max(slope, 1.0), 20.0)


def _with_ties(x: Tensor, k: int, threshold: float, found: Tensor) -> Tensor:
    """Where many are as large as the threshold itself, the first of them, too."""
    if threshold > 0:
        info = torch.finfo(x.dtype)
        below = min(threshold, info.max) * (1 - info.eps)
        found = above(x, below, k)
    return found if len(found) else everything(x[:1])
