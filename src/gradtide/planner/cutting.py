"""The buckets that a replica would cut, without memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial

import torch
from torch import nn

from gradtide.collectives import Dense
from gradtide.fusion import Cost, Fusion, Trace
from gradtide.planner.network import Network
from gradtide.planner.rehearsal import exchange_seconds
from gradtide.planner.trace import StepTrace
from gradtide.runtime.buckets import GradientBucket
from gradtide.runtime.placement import Named, lay_out
from gradtide.scheme import Scheme

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def buckets(trace: StepTrace, scheme: Scheme, network: Network) -> list[GradientBucket]:
    """The buckets that a replica would cut, of `parameters`.

    The fusion is told the times of the trace, and what an exchange of so many bytes
    costs on the network (`exchange_seconds`).
    """

    seconds = cache(partial(exchange_seconds, scheme=scheme, network=network))
    fusion = partial(_informed, scheme.fusion, trace, seconds)
    pieces = scheme.schedule.fragments
    return lay_out(
        parameters(trace), fusion, Dense(), network.size, num_fragments=pieces
    )


def _informed(
    fusion: Fusion, step: StepTrace, seconds: Cost, trace: Trace, cost: Cost
) -> list[slice]:
    """What a fusion makes of a trace with the step's times, and of seconds."""
    if len(trace.nbytes) == len(step.units):
        known = step.fusion()
        trace = replace(trace, forward=known.forward, backward=known.backward)
    return fusion(trace, seconds)


@lru_cache(maxsize=16)
def parameters(trace: StepTrace) -> Sequence[Named]:
    """The units as parameters on the device "meta", in their order."""
    found = []
    for unit in trace.units:
        shape, dtype = unit.shape or (unit.numel,), DTYPES[unit.itemsize]
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        found.append((unit.name, parameter))
    return found
