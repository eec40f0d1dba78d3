"""Entries above a threshold that is found afresh in every call, by bisection."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.select.base import largest
from gradtide.select.follow import completed, estimate
from gradtide.select.kernels import above, entries, everything

AIM = 1.25  # times k: what the sampled threshold should find, as k to 2k will do
GUESS = 1 << 12  # candidates that are sampled for the first guess of the bisection
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Bisect:
    """Within `tolerance` of k, with nothing remembered: a sample, then bisection.

    In the manner of MSTopK (Shi et al., MLSys 2021, arXiv:2010.10458), which bisects
    the threshold over all of `x`. Here a sample brackets it first; one pass collects
    the candidates, and only these are counted again. Ties at the threshold leave more
    than `tolerance` undone: of them, some are taken.
    """

    tolerance: float = 0.02  # of k
    sample: int = 256  # sampled entries above the threshold: more, and fewer passes
    passes: int = 8  # over memory at most; one is the rule

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= 0.5:
            raise ValueError(
                f"Bisect(tolerance={self.tolerance}): choose 0 <= tolerance <= 0.5"
            )
        if self.sample < 16 or self.passes < 1:
            raise ValueError(
                f"Bisect(sample={self.sample}, passes={self.passes}): "
                "choose sample >= 16 and passes >= 1"
            )

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        n, k = x.numel(), max(k, 1)
        if k >= n:
            return everything(x)
        found, values = self._candidates(x, k)
        if len(found) <= k * (1 + self.tolerance):
            return found
        candidates = magnitudes(values)
        bits = candidates.new_tensor([self._bisect(candidates, k)])
        threshold = float(bits.view(values.dtype))
        if not math.isnan(threshold):
            # three times as fast as found[candidates > bits]
            kept = found.index_select(0, above(values, threshold, len(values)))
            if len(kept) > k / 2:
                return kept
        return largest(x, k, found)

    def _candidates(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """k to 2k entries above some threshold; fewer if there is none such."""
        aim = min(round(AIM * k) + 1, x.numel() - 1)
        limit = 2 * k + 16
        threshold, slope = estimate(x, aim, self.sample, seed=0)
        low, high = 0.0, float("inf")  # found too many, too few
        for _ in range(self.passes):
            found, values = entries(x, threshold, limit)
            if k <= len(found) < limit or threshold == 0:
                break
            if len(found) < k:
                high = threshold
            else:
                low = threshold
            step = (max(len(found), 1) / aim) ** (1 / slope)
            inside = low > 0 and high < float("inf")
            threshold = (low * high) ** 0.5 if inside else threshold * step
        if not k <= len(found) < limit:
            least = high if high < float("inf") else threshold
            found = completed(x, k, least, found, limit)
            values = x.index_select(0, found)
        return found, values

    def _bisect(self, magnitudes: Tensor, k: int) -> int:
        """What about `k` of `magnitudes` are above."""
        low, high = -1, int(magnitudes.max())
        some = magnitudes[:: max(1, len(magnitudes) // GUESS)]
        rank = len(some) - round(len(some) * k / len(magnitudes))
        middle = int(some.kthvalue(max(rank, 1)).values)
        while low < middle < high:
            count = int(torch.count_nonzero(magnitudes > middle))
            if abs(count - k) <= self.tolerance * k:
                return middle
            low, high = (middle, high) if count > k else (low, middle)
            middle = (low + high) // 2
        return high


def magnitudes(values: Tensor) -> Tensor:
    """Integers in the order of |values|: the bits without the sign. NaN is largest."""
    bits = values.view(INTEGERS[values.dtype.itemsize])
    return bits & torch.iinfo(bits.dtype).max
