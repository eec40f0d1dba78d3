"""Entries above the quantile of a distribution that is fitted to the magnitudes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from gradtide.select.follow import MEMORY, follow
from gradtide.select.kernels import everything
from gradtide.select.threshold import check

LOOK = 1 << 19  # elements that say enough
RUN = 128  # of them in a row: whole cache lines
KINDS = ("exponential", "gaussian")


@dataclass(frozen=True)
class Fitted:
    """Entries above a fitted quantile, times a factor that the counts teach.

    "exponential" fits the mean of |x|, as SIDCo does (Abdelmoniem et al., MLSys 2021,
    arXiv:2101.10761), "gaussian" its root mean square, as Gaussian-k does (Shi et al.,
    arXiv:1911.08772). Real tails are heavier, by a factor that a sample gives first
    and that is corrected like `Threshold`'s. A change of scale is no change of the
    factor: nothing has to be learnt again. Where `x` is long, the fit is to every so
    many runs of it, always the same ones, so that the factor covers what they miss.
    """

    kind: Literal["exponential", "gaussian"] = "exponential"
    gain: float = 0.5  # share of an error that the next factor makes good
    sample: int = 256  # sampled entries above the threshold, where the fit is far off

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            names = " or ".join(map(repr, KINDS))
            raise ValueError(f"Fitted(kind={self.kind!r}): kind is {names}")
        check("Fitted", self.gain, self.sample)

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        n, k = x.numel(), max(k, 1)
        if k >= n:
            return everything(x)
        fresh = torch.zeros(MEMORY, dtype=torch.float64)
        memory = state.setdefault("fitted", fresh)
        return follow(x, k, memory, self._quantile(x, k), self.gain, self.sample)

    def _quantile(self, x: Tensor, k: int) -> float:
        n, x = x.numel(), _runs(x)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if self.kind == "exponential":
            # five times as fast as the norm
            return float(x.abs().mean(dtype=wide)) * math.log(n / k)
        rms = float(torch.linalg.vector_norm(x, 2, dtype=wide)) / math.sqrt(x.numel())
        return rms * NormalDist().inv_cdf(1 - k / (2 * n))


def _runs(x: Tensor) -> Tensor:
    """About `LOOK` elements of `x` (1-D, contiguous), or all of it if it is short."""
    every = x.numel() // LOOK
    if every < 2:
        return x
    rows = x.numel() // (every * RUN)
    return x[: rows * every * RUN].view(rows, -1)[:, :RUN].reshape(-1)
