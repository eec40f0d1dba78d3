"""What inversions and messages take here: measured, or modelled.

Ranks measure different times, and the same one more than one: all go by rank 0's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from gradtide.core.engine import Engine
from gradtide.core.ops import AllGather
from gradtide.kfac.config import KFAC
from gradtide.kfac.invert import eigen, inverse
from gradtide.kfac.layers import KINDS, Layer, left_out, supported

PROBES = (1 << 8, 1 << 16)  # elements of a rank's part
MOST = 8  # sizes that are measured; the others are modelled
REPEATS = 3
ELEMENT = 4  # bytes

Carried: TypeAlias = Callable[[float, float, float], float]
Form: TypeAlias = Literal["inverse", "eigen"]


@dataclass(frozen=True)
class Costs:
    """Seconds of inversions by rows, and of a gather of n elements of all ranks.

    `ready` is when each factor was there in the first step, A and then G of the layers
    in order; () before it.
    """

    inverses: dict[int, float]
    start: float = 1e-3
    per_element: float = 4e-8  # at 1 Gb/s, without a probe
    ready: tuple[float, ...] = ()

    def send(self, numel: float) -> float:
        return self.start + self.per_element * numel

    def reduce(self, parts: np.ndarray, carried: Carried) -> float:
        """Seconds to sum parts of so many elements, each for its rank.

        Longer where the largest part is much larger than the others, if `carried`
        (`Transport.carried`) says so.
        """
        size, nbytes = len(parts), ELEMENT * parts
        if size == 1:
            return 0.0
        links = carried(nbytes.sum(), nbytes.max(), nbytes.min())
        return self.send(links / ELEMENT * size / (size - 1))


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
        neither is negative. One time alone gives a cubic through it.
        """
        dims = np.array(sorted(times), float)
        seconds = np.array([times[int(d)] for d in dims])
        if len(dims) == 1:
            return cls(0.0, float(seconds[0] / dims[0] ** 3), 3.0)
        fits = []
        for power in np.linspace(1, 3.5, 51):
            grown = (dims / dims[-1]) ** power  # of one size with the times
            columns = np.stack([np.ones_like(dims), grown], 1) / seconds[:, None]
            start, slope = np.linalg.lstsq(columns, np.ones_like(dims), rcond=None)[0]
            if start < 0:
                start, slope = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
            if slope < 0:
                start, slope = columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), 0.0
            errors = columns @ [start, slope] - 1
            model = cls(float(start), float(slope / dims[-1] ** power), float(power))
            fits.append((float(errors @ errors), model))
        return min(fits, key=lambda pair: pair[0])[1]


# Round numbers of the right order, the same in every run.
CUBIC = InverseTime(2e-5, 1 / 3e10, 3.0)


def admitted(model: nn.Module, config: KFAC) -> list[Layer]:
    """The layers to precondition; raises ValueError where there is none."""
    layers = supported(model, config.max_dim)
    if not layers:
        reasons = left_out(model, config.max_dim)
        listed = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise ValueError(
            "K-FAC preconditions Linear and convolution layers, and this model has "
            f"none that it could: leave the preconditioner out ({listed})"
        )
    devices = {layer.weight.device for layer in layers}
    if len(devices) > 1:
        raise ValueError(
            f"K-FAC's layers are on {', '.join(sorted(map(str, devices)))}: it works "
            "on one device; move the model to one, or leave the preconditioner out"
        )
    return layers


def measure(
    config: KFAC,
    layers: Sequence[Layer],
    engine: Engine,
    inverses: Callable[[Sequence[int]], dict[int, float]],
) -> Costs:
    """The same on all ranks; a collective call. `inverses`: here, seconds by rows."""
    dims, group = sorted({la.dim(k) for la in layers for k in KINDS}), engine.group
    if config.placement == "cubic" or group.size == 1:
        return Costs({d: CUBIC(d) for d in dims})
    few = many = 0.0
    if config.early:
        few, many = (_probe(engine, numel) for numel in PROBES)
    # All at once, as in training: ranks may share cores.
    engine.transport.gather_objects(None)
    slope = max(0.0, many - few) / ((PROBES[1] - PROBES[0]) * group.size)
    known = Costs(inverses(dims), few, slope)
    costs: list[Costs] = engine.transport.gather_objects(known)
    return costs[0]


def _probe(engine: Engine, numel: int) -> float:
    seconds = []
    for _ in range(REPEATS):
        begin = engine.clock()
        engine.ask(
            "kfac.probe",
            AllGather(torch.zeros(numel, dtype=torch.float32, device="cpu")),
        )()
        seconds.append(engine.clock() - begin)
    return median(seconds)


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
    factor = torch.full((1, d, d), 0.5 / d, device=device, dtype=torch.float32)
    factor.diagonal(dim1=1, dim2=2).fill_(1.0)
    damping = torch.full((1,), 1e-3, device=device, dtype=torch.float32)
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        if form == "eigen":
            made = eigen(factor, "a probe").values
        else:
            made = inverse(factor, damping, "a probe")
        made.flatten()[0].item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])  # the first loads libraries
