"""Groups of layers: what is handed out of their inverses, or of what these make.

Knows who needs what; nothing of hooks or of when anything leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradtide.engine import Engine, Flight
from gradtide.kfac.assign import EVERYWHERE
from gradtide.kfac.buckets import Factor
from gradtide.kfac.curvature import Curvature
from gradtide.kfac.flows import Piece, Share
from gradtide.kfac.layers import KINDS, Layer
from gradtide.kfac.parts import Parts
from gradtide.ops import Group

Read: TypeAlias = Callable[[nn.Parameter], Tensor | None]


@dataclass(frozen=True)
class Roles:
    """Of one layer: who inverts its factors, and who preconditions its gradient."""

    owners: tuple[int, int]  # of A and G: a rank, or EVERYWHERE
    servers: Sequence[int]  # by rank, who preconditions for it (workers: they)

    def works(self, rank: int) -> bool:
        return self.servers[rank] == rank

    def inverses(self) -> list[tuple[int, frozenset[int]]]:
        """Of A and G: the source, and the ranks that need it."""
        workers = frozenset(self.servers)
        return [
            (owner, frozenset() if owner == EVERYWHERE else workers - {owner})
            for owner in self.owners
        ]

    def products(self) -> list[tuple[int, frozenset[int]]]:
        """The workers, and the other ranks that each of them serves."""
        served = {
            worker: frozenset(r for r, s in enumerate(self.servers) if s == worker)
            for worker in sorted(set(self.servers))
        }
        return [(w, ranks - {w}) for w, ranks in served.items() if ranks - {w}]


@dataclass(eq=False)
class Shared:
    """Pieces that travel together; `deliver` is called when they are there."""

    name: str
    flow: Share
    deliver: Callable[[], None] = lambda: None
    flight: Flight | None = None

    def launch(self, engine: Engine, hold: bool = False) -> None:
        """Send them on their way, or have them wait until they are released."""
        self.flight = engine.launch(self.name, self.flow.run(engine.group), hold)

    def release(self, engine: Engine) -> None:
        """Let them go, if they wait."""
        if self.flight is not None and self.flight.hold:
            engine.release([self.flight])

    def finish(self, engine: Engine) -> None:
        """Wait for them, if they are on their way."""
        if self.flight is not None:
            engine.finish(self.flight)
            self.flight = None
            self.deliver()


class LayerGroup:
    """Layers whose inverses, and preconditioned gradients, travel together."""

    def __init__(
        self,
        number: int,
        layers: Sequence[Layer],
        roles: Mapping[Layer, Roles],
        curvatures: Mapping[Layer, Curvature],
        parts: Parts,
        group: Group,
    ) -> None:
        self.layers, self._roles = layers, roles
        self._curvatures, self._parts, self._rank = curvatures, parts, group.rank
        self._made: dict[Layer, Tensor] = {}  # by this rank, to be shared
        self.read: Read = lambda _: None  # gradients, on the lane
        self._inverses: list[Factor] = []
        self._products: list[Layer] = []
        self.inverses = self._share_inverses(f"kfac.inverse{number}", group)
        self.products = self._share_products(f"kfac.gradient{number}", group)

    def _share_inverses(self, name: str, group: Group) -> Shared:
        pieces = []
        for layer in self.layers:
            for kind, (source, receivers) in zip(
                KINDS, self._roles[layer].inverses(), strict=True
            ):
                if receivers:
                    numel = self._curvatures[layer].numel(kind)
                    pieces.append(Piece(numel, source, receivers))
                    self._inverses.append((layer, kind))
        flow = self._parts.share(pieces, group, self._collect, self._take)
        return Shared(name, flow, self._deliver)

    def _share_products(self, name: str, group: Group) -> Shared | None:
        pieces = []
        for layer in self.layers:
            numel = layer.gradient_numel
            for source, receivers in self._roles[layer].products():
                pieces.append(Piece(numel, source, receivers))
                self._products.append(layer)
        if not pieces:
            return None
        flow = self._parts.share(pieces, group, self._precondition, lambda: None)
        return Shared(name, flow)

    # - On the lane --------------------------------------------------------------------

    def _collect(self) -> None:
        """Wait for the inverses that this rank makes, and put them where they leave."""
        for layer in self.layers:
            self._parts.worker.wait(layer)
        with torch.no_grad():
            for i, view in self.inverses.flow.views.items():
                layer, kind = self._inverses[i]
                if self.inverses.flow.pieces[i].source == self._rank:
                    self._curvatures[layer].encode(kind, view)

    def _take(self) -> None:
        # Also of what was made here: the layout of a matrix in memory, and the lower
        # triangle, change the last digits of a product, and replicas would drift apart.
        with torch.no_grad():
            for i, view in self.inverses.flow.views.items():
                layer, kind = self._inverses[i]
                self._curvatures[layer].decode(kind, view)
        for layer in self.layers:
            self._curvatures[layer].complete()
        if self.products is not None:
            self._adopt()  # used by what comes next on the lane, and by nobody else

    @torch.no_grad()
    def _precondition(self) -> None:
        """Precondition what this rank works on, and put it where it leaves."""
        assert self.products is not None
        self._made.clear()
        for layer in self.layers:
            if self._roles[layer].works(self._rank):
                gradient = matrix(layer, self.read)
                if gradient is not None:
                    made = self._curvatures[layer].precondition(gradient)
                    self._made[layer] = made
        for i, view in self.products.flow.views.items():
            if self.products.flow.pieces[i].source == self._rank:
                product = self._made.get(self._products[i])
                if product is None:
                    view.zero_()
                else:
                    view.copy_(product.flatten())

    # - On the training thread ---------------------------------------------------------

    def _deliver(self) -> None:
        if self.products is None:
            self._adopt()

    def _adopt(self) -> None:
        for layer in self.layers:
            self._curvatures[layer].adopt()

    def product(self, layer: Layer, gradient: Tensor) -> Tensor:
        """The preconditioned gradient, made here or by whoever serves this rank."""
        if self.products is None:
            return self._curvatures[layer].precondition(gradient)
        if layer in self._made:
            return self._made[layer]
        views = self.products.flow.views
        where = next(i for i in views if self._products[i] is layer)
        # A copy: the result of a sum depends on where in memory it begins.
        return views[where].view(gradient.shape).clone()


def gradients(layer: Layer, read: Read) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the weight and the bias."""
    return read(layer.weight), None if layer.bias is None else read(layer.bias)


def matrix(layer: Layer, read: Read) -> Tensor | None:
    """The gradient as a matrix; None unless all of it is there."""
    weight, bias = gradients(layer, read)
    if weight is None or (bias is None) != (layer.bias is None):
        return None
    return layer.matrix(weight, bias)
