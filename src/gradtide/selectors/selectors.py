"""Selectors: what a collective needs of one, and those that there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradtide.selectors.follow import MEMORY, follow
from gradtide.selectors.indices import everything, index_dtype


class Selector(Protocol):
    """Finds the entries of largest magnitude: a frozen dataclass of hyper-parameters.

    Returns the sorted unique indices (1-D, int32; int64 from 2^31 elements on) of about
    `k` entries of `x` (1-D). What it remembers between calls is in `state`, under keys
    of its own. Infinities and NaNs count as the largest magnitudes. At least one index
    is returned, and all of them where k >= n.
    """

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Exact:
    """Find exactly the k entries of largest magnitude, by torch.topk.

    It takes several passes and a sort, and is the yardstick for other selectors. It
    remembers nothing.
    """

    scans = False  # by `kernels`

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        """Find the k largest entries.

        Args:
            x: The values or selection scores of a bucket, 1-D, of any floating dtype.
            k: How many entries to find; 1 if it is less.
            state: Not used.

        Returns:
            Sorted unique indices, 1-D, int32 (int64 from 2^31 elements on): k of them,
                or all.
        """
        if k >= x.numel():
            return everything(x)
        found = torch.topk(x.abs(), max(k, 1), sorted=False).indices
        return found.sort().values.to(index_dtype(x.numel()))


@dataclass(frozen=True)
class Threshold:
    """Find the entries above a remembered threshold, in one pass over the bucket.

    The threshold starts from a random sample, and is used again and adapted between
    samples like Ok-Topk's (Li and Hoefler, PPoPP 2022, arXiv:2201.07598). But the
    correction is proportional to what is missing, on the scale that the data sets; and
    a sample is drawn when the count is far off, within the call, and not every so many
    steps. It finds k entries to within a sixth, but for ties.

    Args:
        gain: The share of an error that the next threshold makes good, above 0 and at
            most 1. Larger values follow faster and repeat the noise of one step. The
            default, 0.5, halves an error in every step.
        sample: How many entries of the sample are to lie above the threshold, 16 or
            more. With more a start is closer to k, and takes longer. The default, 256,
            is off by about a sixteenth.

    Raises:
        ValueError: A field is outside its range.
    """

    gain: float = 0.5  # share of an error that the next threshold makes good
    sample: int = 256  # sampled entries above the threshold: more, and a truer start

    scans = True

    def __post_init__(self) -> None:
        if not 0 < self.gain <= 1:
            raise ValueError(f"Threshold(gain={self.gain}): choose 0 < gain <= 1")
        if self.sample < 16:
            raise ValueError(f"Threshold(sample={self.sample}): choose at least 16")

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        """Find about k entries of largest magnitude.

        Args:
            x: The values or selection scores of a bucket, 1-D and contiguous, of any
                floating dtype. Infinities and NaNs count as the largest.
            k: About how many entries to find; 1 if it is less.
            state: What is remembered between calls for this bucket: "threshold", a
                tensor that is changed in place.

        Returns:
            Sorted unique indices, 1-D, int32 (int64 from 2^31 elements on): about k of
                them, at least one; all, if `k` is not less than the length of `x`.
        """
        k = max(k, 1)
        if k >= x.numel():
            return everything(x)
        fresh = torch.zeros(MEMORY, dtype=torch.float64, device="cpu")
        memory = state.setdefault("threshold", fresh)
        return follow(x, k, memory, self.gain, self.sample)


SELECTORS = (Exact, Threshold)
