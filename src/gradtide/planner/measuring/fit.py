"""Fits of times to alpha and beta: non-negative, and deaf to outliers.

[Note: First the rate] A start-up and the bytes behind it overlap, on an idle link and
where requests follow one another: what takes 1 ms to start and 1 ms to carry does not
take 2. One fit of all sizes would spread that error over both numbers, and make links
faster than they are. So beta is what the largest sizes say, and alpha what is then left
over for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradtide.planner.network import Rate

INSTANT = 1e-9  # seconds, in the place of none
ROUNDS = 30  # of reweighting; it settles in about ten
OUTLIER = 3.0  # robust standard deviations from which a point counts less and less
FLOOR = 0.01  # relative errors below this are noise, however well the others fit
BURST = 0.85  # of the time at the link's rate: what is faster has not met it
HALF = 0.5  # of a request's time: it is mostly a start
NEAR = 1 / 8  # of the largest size: a bucket is small beside what is measured


Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A request that took `seconds`, and how often the model charges for it."""

    name: str  # of the request
    nbytes: int  # of its tensor
    starts: float  # factor of alpha
    carried: float  # factor of beta, bytes
    seconds: float
    processor: float = 0.0  # seconds of a rank's processor


def fit(points: Sequence[Point]) -> Rate:
    """Non-negative alpha and beta, by errors relative to what was measured.

    Beta is fitted with an alpha of its own, errors weighted by the bytes carried; then
    alpha, to the points that spend most of their time on starting, if there are any:
    see [Note: First the rate]. The residual is that of all points.
    """
    if not points:
        return Rate()
    seconds = np.array([max(point.seconds, INSTANT) for point in points])
    columns = np.array([[point.starts, point.carried] for point in points])
    most = max(columns[:, 1].max(), 1e-300)
    relative = columns / seconds[:, None]
    ones = np.ones(len(points))
    beta = _huber(relative, ones, columns[:, 1] / most)[1]
    left = ones - beta * relative[:, 1]
    starting = _mostly(left, columns)
    if not starting.any():
        starting = left == left
    rest = np.column_stack([relative[:, 0], 0 * ones])
    alpha = _huber(rest[starting], left[starting], ones[starting])[0]
    errors = relative @ np.array([alpha, beta]) - 1
    return Rate(float(alpha), float(beta), float(np.sqrt(np.mean(errors**2))))


def _mostly(left: Array, columns: Array) -> NDArray[np.bool_]:
    """Of which points more than half is a start, by the median of those alike."""
    _, alike = np.unique(columns, axis=0, return_inverse=True)
    alike = alike.reshape(-1)
    return np.array([np.median(left[alike == own]) > HALF for own in alike])


def _huber(columns: Array, target: Array, weights: Array) -> Array:
    """Non-negative least squares, reweighted (Huber, 1964).

    A point's weight falls with its error from OUTLIER robust standard deviations on.
    """
    trust = np.ones(len(target))
    for _ in range(ROUNDS):
        each = weights * trust
        found = _non_negative(columns * each[:, None], target * each)
        errors = np.abs(columns @ found - target)
        scale = max(1.4826 * float(np.median(errors)), FLOOR)
        trust = np.sqrt(np.minimum(1.0, OUTLIER * scale / np.maximum(errors, 1e-12)))
    return found


def beyond_burst(
    points: Sequence[Point], rate: float | None = None
) -> tuple[list[Point], list[Point]]:
    """The points that the link's rate has shaped, and those that slipped through.

    A token bucket lets some bytes pass at once after a pause. Requests that took less
    than their bytes' time say nothing of the rate. Where that is not known (bits/s), it
    is read from the slope between the two largest sizes, unless points near the largest
    would go: then it was no bucket but noise.
    """
    beta = 8 / rate if rate else _slope(points)
    slipped = [p for p in points if p.seconds < BURST * beta * p.carried]
    kept = [p for p in points if p not in slipped]
    most = max((p.carried for p in slipped), default=0.0)
    noisy = rate is None and most > NEAR * max(p.carried for p in points)
    if not kept or noisy:
        return list(points), []
    return kept, slipped


def _slope(points: Sequence[Point]) -> float:
    """Seconds a byte between the two largest of three sizes or more; else 0."""
    sizes = sorted({point.carried for point in points})
    if len(sizes) < 3:
        return 0.0
    low, high = (
        float(np.median([p.seconds for p in points if p.carried == size]))
        for size in sizes[-2:]
    )
    slope = max(high - low, 0.0) / (sizes[-1] - sizes[-2])
    return min(slope, high / sizes[-1])


def _non_negative(columns: Array, target: Array) -> Array:
    """Least squares in two unknowns, 0 or more: the best of all active sets."""
    norms = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    scaled = columns / norms
    alone = np.maximum(scaled.T @ target, 0.0)
    candidates = [np.array([alone[0], 0.0]), np.array([0.0, alone[1]])]
    both = np.linalg.lstsq(scaled, target, rcond=None)[0]
    if (both >= 0).all():
        candidates.append(both)
    best = min(candidates, key=lambda x: float(np.linalg.norm(scaled @ x - target)))
    return np.asarray(best / norms)
