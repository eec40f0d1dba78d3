"""Factors on their way to being summed: buffers, and what travels together.

Knows layers, owners and buckets; nothing of hooks, inverses or when anything leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from gradtide.core.engine import Engine, InFlight
from gradtide.core.step import Bucket, Stage
from gradtide.fusion import BySize, Trace
from gradtide.kfac.config import KFAC
from gradtide.kfac.flows import Sum
from gradtide.kfac.layers import Factor, Kind, Layer

UNPLANNED = BySize(25.0, pieces=4)


class FactorBucket(Bucket):
    """Packed factors of one kind that travel together.

    `views` are fp32, by layer, in the order of getting ready. Under "pad" their sums go
    to `owners` only. G carries what ranks tell each other of each layer, `rows` of
    `flow.numbers`, summed for everybody; with it, `arrived` is told of the layers when
    the sums are there (on the queue).
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        layers: Sequence[Layer],
        config: KFAC,
        owners: Mapping[Factor, int],
        size: int,
        arrived: Callable[[Sequence[Layer]], None] = lambda _: None,
    ) -> None:
        super().__init__(name, len(layers))
        self.kind = kind
        self.flight: InFlight | None = None
        self.exchanged: int | None = None  # bytes that were sent, the last time
        by_owner, sizes, numbers = list(layers), None, None
        if config.distribution == "pad":  # parts are in the order of ranks
            by_owner.sort(key=lambda layer: owners[layer, kind])
            sizes = [0] * size
            for layer in layers:
                sizes[owners[layer, kind]] += layer.numel(kind)
        flat, views = _cut({la: la.numel(kind) for la in by_owner}, torch.float32)
        self.views = {layer: views[layer] for layer in layers}
        self.rows: dict[Layer, Tensor] = {}
        if kind == "G":
            numbers, self.rows = _cut({la: la.numbers for la in layers}, torch.float64)
        wire = torch.bfloat16 if config.wire == "bf16" else None
        told = (lambda: arrived(layers)) if kind == "G" else lambda: None
        self.flow = Sum(flat, sizes, wire, numbers, told)

    def launch(self, engine: Engine, hold: bool = False) -> None:
        flow = engine.carried(self.flow.run(engine.group, engine.levels))
        self.flight = engine.launch(self.name, flow, hold, in_turn=True)

    def finish(self, engine: Engine) -> None:
        """Wait for the sums, if they are on their way; buffers may be used again."""
        if self.stage is Stage.SENT and self.flight is not None:
            engine.finish(self.flight)
            self.exchanged, self.flight = self.flight.total, None
            self.move("deliver")


def _cut(
    lengths: Mapping[Layer, int], dtype: torch.dtype
) -> tuple[Tensor, dict[Layer, Tensor]]:
    """A flat buffer of zeros on the layers' device, and each layer's part of it."""
    device = next(iter(lengths)).weight.device
    flat = torch.zeros(sum(lengths.values()), dtype=dtype, device=device)
    parts = torch.split(flat, list(lengths.values()))
    return flat, dict(zip(lengths, parts, strict=True))


def runs(
    kind: Kind, layers: Sequence[Layer], config: KFAC, messages: Mapping[Factor, int]
) -> list[list[Layer]]:
    """Whose factors of one kind travel together, in the order of getting ready.

    Neighbours of the same message do; without `messages`, as the configuration's
    fusion says.
    """
    if messages:
        return [list(run) for _, run in groupby(layers, lambda la: messages[la, kind])]
    trace = Trace([4 * layer.numel(kind) for layer in layers])
    cuts = (config.fusion or UNPLANNED)(trace, lambda _: 0.0)
    return [list(layers[cut]) for cut in cuts]
