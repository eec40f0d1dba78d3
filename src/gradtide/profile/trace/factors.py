"""How long K-FAC's factors of a model's layers take, in steps of their own."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from gradtide.kfac import KFAC
from gradtide.kfac.layers import KINDS, Kind, Layer, supported
from gradtide.kfac.packing import pack
from gradtide.kfac.statistics import Statistics
from gradtide.plan.trace import Factors
from gradtide.profile.trace.subject import Subject

MOST = 5  # timed steps


def factors(
    subject: Subject, steps: int, before: Callable[[], object] = lambda: None
) -> tuple[Factors, ...]:
    """The layers that K-FAC could precondition, with the median seconds of factors.

    `before` is called before each of up to MOST steps, and of one that is not timed:
    in it nobody knows how often a layer is called. The optimizer does not step. None on
    an accelerator, which computes when nobody looks.
    """
    layers = supported(subject.model, KFAC().max_dim)
    if not layers or layers[0].weight.device.type != "cpu":
        return ()
    packed = {(la, k): torch.empty(la.numel(k)) for la in layers for k in KINDS}

    def ready(layer: Layer, kind: Kind, factor: Tensor) -> None:
        pack(factor, packed[layer, kind])

    statistics = Statistics(subject.model, layers, ready)
    times = []
    for step in range(1 + min(steps, MOST)):
        before()
        statistics.arm()
        subject.loss(step).backward()  # type: ignore[no-untyped-call]
        times.append(statistics.spent())
        statistics.finish()
        subject.optimizer.zero_grad()
    names = {p: name for name, p in subject.model.named_parameters()}

    def typical(layer: Layer, kind: Kind) -> float:
        return median(spent[layer, kind] for spent in times[1:])

    return tuple(
        Factors(
            names[layer.weight],
            None if layer.bias is None else names[layer.bias],
            a=typical(layer, "A"),
            g=typical(layer, "G"),
            groups=layer.groups,
        )
        for layer in layers
    )
