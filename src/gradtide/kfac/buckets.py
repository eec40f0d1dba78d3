"""Factors on their way to being summed: buffers, and what travels together.

Knows layers, owners and buckets; nothing of hooks, inverses or when anything leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from gradtide.engine import Engine, Flight
from gradtide.fusion import BySize, Trace
from gradtide.kfac.config import KFAC
from gradtide.kfac.flows import Sum
from gradtide.kfac.layers import Kind, Layer
from gradtide.step import Bucket, Stage

Factor: TypeAlias = tuple[Layer, Kind]
UNPLANNED = BySize(25.0, pieces=4)
WIRES = {"bf16": torch.bfloat16}


class FactorBucket(Bucket):
    """Packed factors of one kind that travel together.

    `views` are fp32, by layer, in the order of getting ready; `rows` those of
    `flow.numbers`.
    """

    def __init__(
        self,
        name: str,
        flow: Sum,
        kind: Kind,
        views: dict[Layer, Tensor],
        rows: dict[Layer, Tensor],
    ) -> None:
        super().__init__(name, len(views))
        self.flow, self.kind, self.views, self.rows = flow, kind, views, rows
        self.flight: Flight | None = None

    def expect(self, absent: set[Factor]) -> None:
        """Expect every factor anew, but those that nobody here had in the last step."""
        self.missing = sum((layer, self.kind) not in absent for layer in self.views)

    def launch(self, engine: Engine, hold: bool = False) -> None:
        """Send the sums on their way."""
        self.flight = engine.launch(self.name, self.flow.run(engine.group), hold)

    def finish(self, engine: Engine) -> None:
        """Wait for the sums, if they are on their way; buffers may be used again."""
        if self.stage is Stage.SENT and self.flight is not None:
            engine.finish(self.flight)
            self.flight = None
            self.move("deliver")

    def clear_absent(self, arrived: set[Factor]) -> None:
        """This rank adds nothing to the sums of what it has nothing for."""
        for layer, view in self.views.items():
            if (layer, self.kind) not in arrived:
                view.zero_()


def lay_out(
    kind: Kind,
    layers: Sequence[Layer],
    config: KFAC,
    owner: Callable[[Factor], int] | None,
    size: int,
    numbers: Callable[[Layer], int],
    arrived: Callable[[Sequence[Layer]], None],
    message: Callable[[Factor], int] | None = None,
) -> list[FactorBucket]:
    """Buckets for the factors of one kind, in the order in which they get ready.

    With `owner` sums go to the owners only. Those of G carry `numbers(layer)` more of
    each layer, summed for everybody, and `arrived` is told when they are there. With
    `message` neighbours of the same message travel together, otherwise as the
    configuration's fusion says.
    """
    if message is None:
        fusion, nbytes = (
            config.fusion or UNPLANNED,
            [4 * la.numel(kind) for la in layers],
        )
        cuts = fusion(Trace(nbytes), lambda _: 0.0) if nbytes else []
    else:
        cuts = _runs([message((layer, kind)) for layer in layers])
    return [
        _bucket(
            f"kfac.{kind}{i}", kind, layers[cut], config, owner, size, numbers, arrived
        )
        for i, cut in enumerate(cuts)
    ]


def _runs(messages: Sequence[int]) -> list[slice]:
    """Where equal numbers follow each other."""
    ends = [i for i in range(1, len(messages)) if messages[i - 1] != messages[i]]
    return [slice(a, b) for a, b in pairwise([0, *ends, len(messages)])]


def _bucket(
    name: str,
    kind: Kind,
    layers: Sequence[Layer],
    config: KFAC,
    owner: Callable[[Factor], int] | None,
    size: int,
    numbers: Callable[[Layer], int],
    arrived: Callable[[Sequence[Layer]], None],
) -> FactorBucket:
    device = layers[0].weight.device
    by_owner, sizes = list(layers), None
    if owner is not None:  # parts are in the order of ranks
        by_owner.sort(key=lambda layer: owner((layer, kind)))
        sizes = [0] * size
        for layer in layers:
            sizes[owner((layer, kind))] += layer.numel(kind)
    lengths = [layer.numel(kind) for layer in by_owner]
    flat = torch.zeros(sum(lengths), device=device)
    pieces = dict(zip(by_owner, torch.split(flat, lengths), strict=True))
    along, rows = None, {}
    if kind == "G":
        counts = [numbers(layer) for layer in layers]
        along = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        rows = dict(zip(layers, torch.split(along, counts), strict=True))
    wire = WIRES.get(config.wire or "")
    told = (lambda: arrived(layers)) if kind == "G" else lambda: None
    flow = Sum(flat, sizes, wire, along, told)
    return FactorBucket(name, flow, kind, {la: pieces[la] for la in layers}, rows)


def local(
    layers: Sequence[Layer], numbers: Callable[[Layer], int]
) -> list[FactorBucket]:
    """Buffers for factors that stay on this rank."""
    config = KFAC("dp")
    return [
        _bucket("", kind, [layer], config, None, 1, numbers, lambda _: None)
        for layer in layers
        for kind in ("A", "G")
    ]
