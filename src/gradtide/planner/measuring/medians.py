"""One typical step from several that were watched.

[Note: Medians of moments] Intervals vary more than moments, and their medians do not
add up to the median of the whole. So the medians are those of moments, each counted
from the beginning of its pass, and the intervals are differences of them. (Guarded by
test_times_add_up_to_the_whole.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import TypeVar

from torch import nn

from gradtide.planner.trace import StepTrace, Unit
from gradtide.runtime.layout.placement import Named

T = TypeVar("T")


@dataclass(frozen=True)
class Seconds:
    """A pass in seconds: moments of each parameter from the beginning of its pass."""

    read: Mapping[nn.Parameter, float]
    ready: Mapping[nn.Parameter, float]
    forward: float
    loss: float
    optimizer: float


def typical(name: str, named: Sequence[Named], steps: Sequence[Seconds]) -> StepTrace:
    """The trace of steps of the trainable parameters `named`, in registered order."""
    # Among equals, what is registered first is read first, and gets ready last.
    names = {p: n for n, p in named}
    forward = _moments([p for _, p in named], [s.read for s in steps])
    backward = _moments(list(steps[0].ready), [s.ready for s in steps])
    order = [*backward, *(p for _, p in reversed(named) if p not in backward)]
    end = max([median(s.forward for s in steps), *forward.values()])
    # What comes before the first moment counts as the first's.
    computed = _between(forward, [0.0, *list(forward.values())[1:], end])
    arrived = _between(backward, [0.0, *backward.values()])
    optimizer = median(s.optimizer for s in steps)
    numel = sum(p.numel() for p in backward)
    units = tuple(
        Unit(
            name=names[p],
            numel=p.numel(),
            itemsize=p.element_size(),
            forward=computed.get(p, 0.0),
            backward=arrived.get(p, 0.0),
            optimizer=optimizer * p.numel() / numel if p in backward else 0.0,
            shape=tuple(p.shape),
        )
        for p in order
    )
    places = {p: i for i, p in enumerate(order)}
    read = tuple(places[p] for p in dict.fromkeys([*forward, *order]))
    return StepTrace(name, units, optimizer, median(s.loss for s in steps), read)


def across(traces: Sequence[StepTrace]) -> StepTrace:
    """The median of several ranks' traces of one model, in the first one's order.

    Raises ValueError where they are not of the same parameters.
    """
    first, *others = traces
    sizes = {unit.name: unit.numel for unit in first.units}
    for rank, other in enumerate(others, 1):
        if {unit.name: unit.numel for unit in other.units} != sizes:
            raise ValueError(
                f"rank {rank} traced other parameters than rank 0: build the same model"
                " on every rank"
            )
    by_name = [{unit.name: unit for unit in trace.units} for trace in traces]
    units = [[found[unit.name] for found in by_name] for unit in first.units]
    layers = zip(*(trace.layers for trace in traces), strict=True)
    return replace(
        _middle(traces, "optimizer", "loss", "processor"),
        units=tuple(_middle(u, "forward", "backward", "optimizer") for u in units),
        layers=tuple(_middle(layer, "a", "g") for layer in layers),
    )


def _middle(several: Sequence[T], *names: str) -> T:
    """The first of several dataclasses, with the medians of these fields."""
    middle = {name: median(getattr(one, name) for one in several) for name in names}
    return replace(several[0], **middle)  # type: ignore[type-var]


def _moments(
    order: Sequence[nn.Parameter], steps: Sequence[Mapping[nn.Parameter, float]]
) -> dict[nn.Parameter, float]:
    """The median moment of each parameter that has one, in the order of moments."""
    found: dict[nn.Parameter, list[float]] = {p: [] for p in order}
    for step in steps:
        for p, moment in step.items():
            found.setdefault(p, []).append(moment)
    moments = {p: median(each) for p, each in found.items() if each}
    return dict(sorted(moments.items(), key=itemgetter(1)))  # of equals as in `order`


def _between(
    params: Iterable[nn.Parameter], moments: Sequence[float]
) -> dict[nn.Parameter, float]:
    return {p: b - a for p, (a, b) in zip(params, pairwise(moments), strict=True)}
