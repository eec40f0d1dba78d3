"""Factors on their way to being summed: buffers, and what travels together.

Knows layers, owners and buckets; nothing of hooks, inverses or when anything leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from gradtide.bucket import Bucket, Payload
from gradtide.fusion import BySize, Trace
from gradtide.kfac.config import KFAC
from gradtide.kfac.flows import Sum
from gradtide.kfac.layers import Kind, Layer

Factor: TypeAlias = tuple[Layer, Kind]
UNPLANNED = BySize(25.0, pieces=4)
WIRES = {"bf16": torch.bfloat16}


@dataclass(eq=False)
class FactorBucket:
    """Packed factors of one kind that travel together."""

    bucket: Bucket
    flow: Sum
    kind: Kind
    views: dict[Layer, Tensor]  # packed fp32, by layer, in the order of getting ready
    rows: dict[Layer, Tensor]  # of `flow.numbers`
    missing: int = 0  # factors that have not arrived in this step
    left: bool = False  # in this step

    def rearm(self, absent: set[Factor]) -> None:
        """Expect every factor anew, but those that nobody here had in the last step."""
        self.missing = sum((layer, self.kind) not in absent for layer in self.views)
        self.left = False

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
    bucket = Bucket(name, nothing(device), flow, lambda _: None)
    return FactorBucket(bucket, flow, kind, {la: pieces[la] for la in layers}, rows)


def nothing(device: torch.device) -> Payload:
    """The payload of a flow that averages no gradient."""
    return Payload(torch.empty(0, device=device), [])


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
