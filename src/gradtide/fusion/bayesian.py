"""The one place that knows the library for Bayesian optimisation (extra `tune`)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

EXPLORE = 0.01  # improvement, in units of the targets, that is not worth a trial
NOISE = 1e-3  # variance of a target beside the spread of all: jumps at bucket bounds


def suggest(
    low: float, high: float, tried: Sequence[tuple[float, float]], seed: int
) -> float:
    """Where between `low` and `high` (logarithms of MB) to try next.

    `tried` are sizes in MB and seconds. Raises ValueError without the library.
    """
    try:
        from bayes_opt import BayesianOptimization, acquisition
    except ImportError:
        raise ValueError(
            "Bayesian() needs the library bayesian-optimization: "
            "pip install 'gradtide[tune]', or use BinarySearch()"
        ) from None
    optimizer = BayesianOptimization(
        None,
        {"size": (low, high)},
        acquisition_function=acquisition.ExpectedImprovement(xi=EXPLORE),
        random_state=seed + len(tried),
        verbose=0,
        allow_duplicate_points=True,
    )
    optimizer.set_gp_params(alpha=NOISE)
    for megabytes, seconds in tried:
        size = min(max(math.log(megabytes), low), high)  # it was rounded
        optimizer.register({"size": size}, -math.log(seconds))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fit: that a length scale is at a bound
        return float(optimizer.suggest()["size"])
