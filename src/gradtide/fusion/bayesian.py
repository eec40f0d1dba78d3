"""The one place that knows the library for Bayesian optimisation (extra `tune`)."""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from collections.abc import Sequence

EXPLORE = 0.01  # improvement, in units of the targets, that is not worth a trial
NOISE = 1e-3  # variance of a target beside the spread of all: jumps at bucket bounds


def require() -> None:
    """Raise ValueError if the library is not there; it is not loaded yet."""
    if "bayes_opt" in sys.modules:
        found = sys.modules["bayes_opt"] is not None
    else:
        found = importlib.util.find_spec("bayes_opt") is not None
    if not found:
        raise ValueError(
            "Bayesian() needs the library bayesian-optimization: "
            "pip install 'gradtide[tune]', or use BinarySearch()"
        )


def suggest(
    low: float, high: float, tried: Sequence[tuple[float, float]], seed: int
) -> float:
    """Where between `low` and `high` (logarithms of MB) to try next.

    `tried` are sizes in MB and seconds.
    """
    from bayes_opt import BayesianOptimization, acquisition

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
