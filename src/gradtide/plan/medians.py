"""One typical step from several that were watched.

[Note: Medians of moments] Intervals vary more than moments, and their medians do not
add up to the median of the whole. So the medians are those of moments, each counted
from the beginning of its pass, and the intervals are differences of them. (Guarded by
test_times_add_up_to_the_whole.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from torch import nn

from gradtide.plan.trace import StepTrace, Unit


@dataclass(frozen=True)
class Seconds:
    """A pass in seconds: moments of each parameter from the beginning of its pass."""

    read: Mapping[nn.Parameter, float]
    ready: Mapping[nn.Parameter, float]
    forward: float
    loss: float
    optimizer: float


def typical(
    name: str,
    named: Sequence[tuple[str, nn.Parameter]],
    steps: Sequence[Seconds],
) -> StepTrace:
    """The trace of steps of the trainable parameters `named`, in registered order."""
    # Among equals, what is registered first is read first, and gets ready last.
    names = {p: n for n, p in named}
    forward = _moments([p for _, p in named], [s.read for s in steps])
    backward = _moments(list(steps[0].ready), [s.ready for s in steps])
    unused = [p for _, p in reversed(named) if p not in backward]
    order = [*backward, *unused]
    end = max([median(s.forward for s in steps), *forward.values()])
    computed = _until_the_next(forward, end)
    arrived = dict(zip(backward, _since_the_last(backward), strict=True))
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
    read = [places[p] for p in forward]
    read += [i for p, i in places.items() if p not in forward]
    loss = median(s.loss for s in steps)
    return StepTrace(name, units, optimizer, loss, tuple(read))


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
    units = tuple(
        _middle([found[unit.name] for found in by_name]) for unit in first.units
    )
    return replace(
        first,
        units=units,
        optimizer=median(trace.optimizer for trace in traces),
        loss=median(trace.loss for trace in traces),
        processor=median(trace.processor for trace in traces),
        layers=tuple(
            replace(
                layers[0],
                a=median(layer.a for layer in layers),
                g=median(layer.g for layer in layers),
            )
            for layers in zip(*(trace.layers for trace in traces), strict=True)
        ),
    )


def _middle(units: Sequence[Unit]) -> Unit:
    return replace(
        units[0],
        forward=median(unit.forward for unit in units),
        backward=median(unit.backward for unit in units),
        optimizer=median(unit.optimizer for unit in units),
    )


def _moments(
    order: Sequence[nn.Parameter], steps: Sequence[Mapping[nn.Parameter, float]]
) -> dict[nn.Parameter, float]:
    """The median moment of each parameter that has one, in the order of moments."""
    seen = {p: i for i, p in enumerate(order)}
    for step in steps:
        for p in step:
            seen.setdefault(p, len(seen))
    found = {p: [step[p] for step in steps if p in step] for p in seen}
    moments = {p: median(each) for p, each in found.items() if each}
    return dict(sorted(moments.items(), key=lambda item: (item[1], seen[item[0]])))


def _since_the_last(moments: Mapping[nn.Parameter, float]) -> list[float]:
    return [b - a for a, b in pairwise([0.0, *moments.values()])]


def _until_the_next(
    moments: Mapping[nn.Parameter, float], end: float
) -> dict[nn.Parameter, float]:
    """What comes before the first moment counts as the first's."""
    cuts = [0.0, *list(moments.values())[1:], end]
    return {p: b - a for p, (a, b) in zip(moments, pairwise(cuts), strict=True)}
