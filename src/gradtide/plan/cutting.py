"""The buckets that a replica would cut, without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import nn

from gradtide import fusion as fusions
from gradtide.collectives import Dense
from gradtide.fusion import Fusion
from gradtide.gradients import GradientBucket
from gradtide.layout import Named, lay_out
from gradtide.plan.network import Network
from gradtide.plan.played import exchange_seconds
from gradtide.plan.trace import StepTrace
from gradtide.scheme import Scheme

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def buckets(trace: StepTrace, scheme: Scheme, network: Network) -> list[GradientBucket]:
    """The buckets that a replica would cut, of `parameters`.

    The fusion is told the times of the trace, and what an exchange of so many bytes
    costs on the network (`exchange_seconds`).
    """

    @cache
    def seconds(nbytes: int) -> float:
        return exchange_seconds(nbytes, scheme, network)

    fusion = _Informed(scheme.fusion, trace, seconds)
    return lay_out(parameters(trace), fusion, Dense(), network.size)


@lru_cache(maxsize=16)
def parameters(trace: StepTrace) -> Sequence[Named]:
    """The units as parameters on the device "meta", in their order."""
    return [
        (
            unit.name,
            nn.Parameter(
                torch.empty(
                    unit.shape or (unit.numel,),
                    dtype=DTYPES[unit.itemsize],
                    device="meta",
                )
            ),
        )
        for unit in trace.units
    ]


@dataclass(frozen=True)
class _Informed:
    """A fusion that is told the times of a trace and the cost of an exchange."""

    fusion: Fusion
    trace: StepTrace
    seconds: Callable[[int], float]

    def __call__(
        self, trace: fusions.Trace, cost: Callable[[int], float]
    ) -> list[slice]:
        units = self.trace.units
        if len(trace.nbytes) == len(units):
            trace = replace(
                trace,
                forward=[unit.forward for unit in units],
                backward=[unit.backward for unit in units],
            )
        return self.fusion(trace, self.seconds)
