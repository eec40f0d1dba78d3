"""A threshold that follows the data: from a sample, then by what it found."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtide.selectors.indices import everything, index_dtype
from gradtide.selectors.kernels import above, largest

MEMORY = 4  # numbers remembered: threshold, velocity, slope, calls
STEEP = 4.0  # the slope of a tail that has not been looked at
BAND = 0.15  # of k: counts that are further off are put right in the same call
JUMP = 1.0  # log of a change of scale that is an event, not a trend


def follow(x: Tensor, k: int, memory: Tensor, gain: float, hits: int) -> Tensor:
    """About `k` indices into `x` (0 < k < n), within a sixth of k but for ties.

    What is remembered (float64, on the CPU) is the threshold; 0 for none yet. Its
    logarithm is tracked by level and velocity (Holt, 1957): after a call the threshold
    is known that would have found k, from the count and the slope of the tail, and the
    next one is `gain` of the way there, and a step along the trend ahead: what error
    feedback leaves behind grows for many steps, and an integrator alone would lag
    behind it all the way. It grows like a power of the number of steps, so the velocity
    falls. The first calls go further than `gain`: as far as a straight line through all
    that is known would.

    One pass over memory while the count stays within the band or slightly above, and
    one more with a sample of about `hits` entries above the threshold when it does not.
    For each of the passes, and for a sample, the host waits for a GPU once.
    """
    threshold, velocity, slope, calls = memory.tolist()
    seed, limit = int(calls), 2 * k + 16
    found = above(x, threshold, limit) if threshold > 0 else everything(x[:0])
    used, whole, following = threshold, True, threshold
    if not (1 - BAND) * k <= len(found) < limit:
        used, slope = estimate(x, k, hits, seed)
        found = above(x, used, limit)
        whole = k / 2 <= len(found) < limit
        if not whole:
            found = completed(x, k, used, found, limit)
    if len(found) > max(k + 1, (1 + BAND) * k):
        used, found = trim(x, k, found, seed)
    ideal = used * (len(found) / k) ** (1 / slope) if whole else used
    if 0 < ideal < math.inf:
        miss = math.log(ideal / threshold) if threshold > 0 else math.inf
        if abs(miss) < JUMP:
            n = calls + 1
            level, trend = 2 * (2 * n - 1) / (n * (n + 1)), 6 / (n * (n + 1))
            velocity += min(max(gain / 2, trend), 1.0) * miss
            if n > 1:
                velocity *= math.log1p(1 / n) / -math.log1p(-1 / n)
            ideal = threshold * math.exp(min(max(gain, level), 1.0) * miss + velocity)
        else:
            velocity = 0.0
        following = ideal
    memory.copy_(
        torch.tensor(
            [following, velocity, slope, calls + 1], dtype=torch.float32, device="cpu"
        )
    )
    return found


def estimate(x: Tensor, k: int, hits: int, seed: int) -> tuple[float, float]:
    """A threshold that about `k` of |x| are above, and the slope of the tail there.

    Both come from a random sample of `x` (1-D, n > k) in which about `hits` are above
    it, one element of every `stride`: in order, memory is read faster than all over
    the place. They are exact to within ties if that is all of `x`. The slope is
    -d log(count) / d log(threshold).
    """
    n = x.numel()
    stride = n // min(n, -(-n * hits // k), 1 << 20)
    size = n // stride
    if stride > 1:
        rng, dtype = torch.Generator(x.device).manual_seed(seed), index_dtype(n)
        chosen = torch.randint(
            stride, (size,), generator=rng, dtype=dtype, device=x.device
        )
        chosen += torch.arange(0, size * stride, stride, dtype=dtype, device=x.device)
        x = x.index_select(0, chosen)  # three times as fast as x[chosen]
    rank = min(max(1, round(size * k / n)), size - 1)
    further = min(size, 2 * rank)
    top = torch.topk(x.abs().nan_to_num_(math.inf, math.inf), further).values
    last, beyond, low = torch.stack([top[rank - 1], top[rank], top[-1]]).tolist()
    threshold = math.sqrt(last) * math.sqrt(beyond) if beyond < last else last
    if not 0 < low < last < math.inf:
        return threshold, STEEP
    slope = math.log(further / rank) / math.log(last / low)
    return threshold, min(max(slope, 1.0), 20.0)


def trim(x: Tensor, k: int, found: Tensor, seed: int) -> tuple[float, Tensor]:
    """The larger ones of `found`, about `k` of them, and a threshold they are above."""
    values = x.index_select(0, found)
    threshold, _ = estimate(values, k, 4096, seed)
    kept = found[above(values, threshold, len(found))]
    fits = k / 2 < len(kept) <= 2 * k
    return threshold, kept if fits else largest(x, k, found)


def completed(x: Tensor, k: int, threshold: float, found: Tensor, limit: int) -> Tensor:
    """What the threshold found (`limit` at most), and what it missed that must go.

    If it found few, the first `k` of those not below it: many are exactly there. If it
    found too many, infinities and NaNs beyond the limit. Zeros are never added: where
    nothing else is left, the first index stands for all.
    """
    info = torch.finfo(x.dtype)
    least = min(threshold * (1 - info.eps), info.max)
    if len(found) >= limit:
        least = info.max
    if least > 0:
        found = torch.unique(torch.cat([found, above(x, least, k)]))
    return found if len(found) else everything(x[:1])
