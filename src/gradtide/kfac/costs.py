"""What inversions and gathers cost here, and on that who does what: once, at set-up.

Ranks measure different times, and the same one more than one: all go by rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from gradtide.engine import Engine
from gradtide.kfac.config import KFAC
from gradtide.kfac.layers import KINDS, Kind, Layer, left_out, supported
from gradtide.kfac.timing import CUBIC
from gradtide.ops import AllGather

PROBES = (1 << 8, 1 << 16)  # elements of a rank's part
REPEATS = 3
ELEMENT = 4  # bytes

Carried: TypeAlias = Callable[[float, float, float], float]


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

    def inverse(self, rows: int) -> float:
        return self.inverses[rows]

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
    """The same on all ranks; a collective call.

    `inverses` tells the seconds of inversions by rows on this rank.
    """
    dims = sorted({layer.dim(kind) for layer in layers for kind in KINDS})
    if config.placement == "cubic" or engine.transport.group.size == 1:
        return Costs({d: CUBIC(d) for d in dims})
    probes = (0.0, 0.0)
    if config.early:
        probes = _probe(engine, PROBES[0]), _probe(engine, PROBES[1])
    # All at once, as in training: ranks may share cores.
    engine.transport.gather_objects(None)
    seconds = inverses(dims)
    size = engine.transport.group.size
    slope = max(0.0, probes[1] - probes[0]) / ((PROBES[1] - PROBES[0]) * size)
    costs: list[Costs] = engine.transport.gather_objects(
        Costs(seconds, probes[0], slope)
    )
    return costs[0]


def watched(
    known: Costs,
    times: Mapping[tuple[Layer, Kind], float],
    layers: Sequence[Layer],
    engine: Engine,
) -> Costs:
    """With rank 0's times of factors in a step; a collective call."""
    ready = tuple(times[layer, kind] for kind in KINDS for layer in layers)
    agreed: list[tuple[float, ...]] = engine.transport.gather_objects(ready)
    return replace(known, ready=agreed[0])


def _probe(engine: Engine, numel: int) -> float:
    seconds = []
    for _ in range(REPEATS):
        begin = engine.clock()
        engine.ask("kfac.probe", AllGather(torch.zeros(numel)))()
        seconds.append(engine.clock() - begin)
    return median(seconds)
