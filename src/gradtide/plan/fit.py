"""Fits of times to alpha and beta: non-negative, relative, and deaf to outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 30  # of reweighting; it settles in about ten
OUTLIER = 3.0  # robust standard deviations from which a point counts less and less
FLOOR = 0.01  # relative errors below this are noise, however well the others fit
BURST = 0.85  # of the time at the link's rate: what is faster has not met it

NEAR = 1 / 8  # of the largest size: a bucket is small beside what is measured


@dataclass(frozen=True)
class Point:
    """A request that took `seconds`, and how often the model charges for it."""

    name: str  # of the request
    nbytes: int  # of its tensor
    starts: float  # factor of alpha
    carried: float  # factor of beta, bytes
    seconds: float


@dataclass(frozen=True)
class Fit:
    """alpha * starts + beta * carried, with the root mean square of relative errors."""

    alpha: float
    beta: float
    residual: float

    def __call__(self, point: Point) -> float:
        """Seconds that the fit predicts."""
        return self.alpha * point.starts + self.beta * point.carried


def fit(points: Sequence[Point]) -> Fit:
    """The best non-negative alpha and beta, by errors relative to what was measured.

    Reweighted least squares: a point's weight falls with its error from OUTLIER robust
    standard deviations on (Huber, 1964). The residual is that of all points.
    """
    if not points:
        return Fit(0.0, 0.0, 0.0)
    seconds = np.array([point.seconds for point in points])
    columns = np.array([[point.starts, point.carried] for point in points])
    columns /= seconds[:, None]
    weights = np.ones(len(points))
    for _ in range(ROUNDS):
        found = _non_negative(columns * weights[:, None], weights)
        errors = np.abs(columns @ found - 1)
        scale = max(1.4826 * float(np.median(errors)), FLOOR)
        weights = np.sqrt(np.minimum(1.0, OUTLIER * scale / np.maximum(errors, 1e-12)))
    residual = float(np.sqrt(np.mean((columns @ found - 1) ** 2)))
    return Fit(float(found[0]), float(found[1]), residual)


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


def _non_negative(
    columns: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
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
