"""How long the inversion of a factor takes on this device: measured, or modelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradtide.kfac.invert import eigen, inverse

Form: TypeAlias = Literal["inverse", "eigen"]
MOST = 8  # sizes that are measured; the others are modelled
REPEATS = 3


@dataclass(frozen=True)
class InverseTime:
    """Seconds of the inversion of a matrix of d rows: start + slope * d ** power."""

    start: float
    slope: float
    power: float

    def __call__(self, d: int) -> float:
        return float(self.start + self.slope * d**self.power)

    @classmethod
    def fit(cls, times: Mapping[int, float]) -> InverseTime:
        """The model with the smallest squares of relative errors.

        For each of many powers the best start and slope are found by least squares;
        neither is negative.
        One time alone gives a cubic through it.
        """
        dims = np.array(sorted(times), float)
        seconds = np.array([times[int(d)] for d in dims])
        if len(dims) == 1:
            return cls(0.0, float(seconds[0] / dims[0] ** 3), 3.0)
        fits = [cls._fixed(dims, seconds, power) for power in np.linspace(1, 3.5, 51)]
        return min(fits, key=lambda pair: pair[0])[1]

    @classmethod
    def _fixed(
        cls, dims: np.ndarray, seconds: np.ndarray, power: float
    ) -> tuple[float, InverseTime]:
        """(squares, model) with a given power."""
        grown = (dims / dims[-1]) ** power  # of one size with the times
        columns = np.stack([np.ones_like(dims), grown], 1) / seconds[:, None]
        start, slope = np.linalg.lstsq(columns, np.ones_like(dims), rcond=None)[0]
        if start < 0:
            start, slope = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
        if slope < 0:
            start, slope = columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), 0.0
        errors = columns @ [start, slope] - 1
        model = cls(float(start), float(slope / dims[-1] ** power), float(power))
        return float(errors @ errors), model


# Round numbers of the right order, the same in every run.
CUBIC = InverseTime(2e-5, 1 / 3e10, 3.0)


def time_inverses(
    dims: Iterable[int], device: torch.device, form: Form = "inverse"
) -> dict[int, float]:
    """Median seconds to invert one fp32 matrix of each number of rows, on `device`."""
    return {d: _time(d, device, form) for d in sorted(set(dims))}


def estimate_inverses(
    dims: Iterable[int], device: torch.device, form: Form = "inverse"
) -> dict[int, float]:
    """As `time_inverses`, but at most MOST sizes are measured, evenly over their order.

    The others follow a fit of those, so that a deep model does not wait for all.
    """
    wanted = sorted(set(dims))
    chosen = {wanted[round(i)] for i in np.linspace(0, len(wanted) - 1, MOST)}
    times = time_inverses(chosen, device, form)
    model = InverseTime.fit(times)
    return {d: times[d] if d in times else model(d) for d in wanted}


def _time(d: int, device: torch.device, form: Form) -> float:
    # Diagonally dominant: definite, and not as easy as a diagonal one.
    factor = torch.full((1, d, d), 0.5 / d, device=device)
    factor.diagonal(dim1=1, dim2=2).fill_(1.0)
    damping = torch.full((1,), 1e-3, device=device)
    run: Callable[[], Tensor] = {
        "inverse": lambda: inverse(factor, damping, "a probe"),
        "eigen": lambda: eigen(factor, "a probe").values,
    }[form]
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        run().flatten()[0].item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])  # the first loads libraries
