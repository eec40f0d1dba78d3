"""Groups of layers: what is handed out of their inverses, or of what these make.

Knows who needs what; nothing of hooks or of when anything leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradtide.core.engine import Engine, InFlight
from gradtide.kfac import invert
from gradtide.kfac.assign import EVERYWHERE
from gradtide.kfac.curvature import Curvature
from gradtide.kfac.flows import Piece, Share
from gradtide.kfac.layers import KINDS, Factor, Layer
from gradtide.kfac.parts import Parts

Read: TypeAlias = Callable[[nn.Parameter], Tensor | None]


class LayerGroup:
    """Layers whose inverses, and preconditioned gradients, travel together.

    `servers` are, by layer and rank, who preconditions for a rank; they serve
    themselves. The others are given no inverses, but the result.
    """

    def __init__(
        self,
        number: int,
        layers: Sequence[Layer],
        owners: Mapping[Factor, int],
        servers: Mapping[Layer, Sequence[int]],
        curvatures: Mapping[Layer, Curvature],
        parts: Parts,
        engine: Engine,
    ) -> None:
        self.layers, self._curvatures = layers, curvatures
        self._servers, self._worker = servers, parts.worker
        self._rank = engine.group.rank
        self._made: dict[Layer, Tensor] = {}  # by this rank, to be shared
        self._read: Read = lambda _: None  # gradients, on the queue
        inverses, products = [], []
        for layer in layers:
            workers = frozenset(servers[layer])
            for kind in KINDS:
                owner, numel = owners[layer, kind], curvatures[layer].numel(kind)
                others = workers - {owner}
                if owner != EVERYWHERE and others:
                    inverses.append(Piece(numel, owner, others, (layer, kind)))
            for worker in sorted(workers):
                served = (r for r, who in enumerate(servers[layer]) if who == worker)
                others, numel = frozenset(served) - {worker}, prod(layer.gradient_shape)
                if others:
                    products.append(Piece(numel, worker, others, layer))
        where = engine.group, layers[0].weight.device
        self._inverses = parts.share(inverses, *where, self._collect, self._take)
        self._products = parts.share(products, *where, self._precondition, lambda: None)
        self._number, self._engine = number, engine
        self._in_flight: dict[str, InFlight] = {}  # by what is on its way

    # - On the queue -------------------------------------------------------------------

    @torch.no_grad()
    def _collect(self) -> None:
        """Wait for the inverses that this rank makes, and put them where they leave."""
        for layer in self.layers:
            self._worker.wait(layer)
        for piece, view in self._inverses.views.items():
            layer, kind = piece.of
            if piece.source == self._rank:
                self._curvatures[layer].encode(kind, view)

    @torch.no_grad()
    def _take(self) -> None:
        # Also of what was made here: the layout of a matrix in memory, and the lower
        # triangle, change the last digits of a product, and replicas would drift apart.
        for piece, view in self._inverses.views.items():
            layer, kind = piece.of
            self._curvatures[layer].decode(kind, view)
        for layer in self.layers:
            self._curvatures[layer].complete()
        if self._products.pieces:
            self._adopt()  # used by what comes next on the queue, and by nobody else

    @torch.no_grad()
    def _precondition(self) -> None:
        """Precondition what this rank works on, and put it where it leaves."""
        self._made.clear()
        for layer in self.layers:
            if self._servers[layer][self._rank] == self._rank:
                found = gradients(layer, self._read)
                if found:
                    gradient = layer.matrix(*found)
                    self._made[layer] = self._curvatures[layer].precondition(gradient)
        for piece, view in self._products.views.items():
            if piece.source == self._rank:
                product = self._made.get(piece.of)
                if product is None:
                    view.zero_()
                else:
                    view.copy_(product.flatten())

    # - On the training thread ---------------------------------------------------------

    def launch(self, hold: bool) -> None:
        """Hand out inverses, or make them wait to be released."""
        self.finish()
        self._launch("inverse", self._inverses, hold)

    def release_inverses(self) -> None:
        """Let inverses go, if they wait."""
        flight = self._in_flight.get("inverse")
        if flight is not None and flight.hold:
            self._engine.release(flight)

    def release(self, read: Read) -> None:
        """Let inverses go, and what is made of gradients (`read`, on the queue)."""
        self.release_inverses()
        if self._products.pieces:
            self._finish("gradient")
            self._read = read
            self._launch("gradient", self._products)

    def finish(self) -> None:
        """Take delivery of inverses, if they are on their way."""
        if self._finish("inverse") and not self._products.pieces:
            self._adopt()

    def deliver(self) -> None:
        """Wait for all that `product` needs: see [Note: new inverses]."""
        self.finish()
        self._finish("gradient")

    def _launch(self, what: str, share: Share, hold: bool = False) -> None:
        engine, name = self._engine, f"kfac.{what}{self._number}"
        flow = engine.carried(share.run(engine.group, engine.levels))
        self._in_flight[what] = engine.launch(name, flow, hold, in_turn=True)

    def _finish(self, what: str) -> bool:
        """Whether it was on its way."""
        if what not in self._in_flight:
            return False
        self._engine.finish(self._in_flight[what])
        del self._in_flight[what]
        return True

    def _adopt(self) -> None:
        for layer in self.layers:
            self._curvatures[layer].adopt()

    def product(self, layer: Layer, gradient: Tensor) -> Tensor:
        """The preconditioned gradient, made here or by whoever serves this rank."""
        if not self._products.pieces:
            return self._curvatures[layer].precondition(gradient)
        if layer in self._made:
            return self._made[layer]
        views = self._products.views
        view = next(view for piece, view in views.items() if piece.of is layer)
        # A copy: the result of a sum depends on where in memory it begins.
        return view.view(gradient.shape).clone()


@torch.no_grad()
def precondition(
    groups: Sequence[LayerGroup],
    read: Read,
    rates: Mapping[nn.Parameter, float],
    kl_clip: float | None,
) -> None:
    """Precondition the gradients of some released groups in place.

    `rates` are learning rates. With `kl_clip` these are all groups.
    """
    made: list[tuple[Layer, list[Tensor], Tensor]] = []
    parts: list[Tensor] = []
    for group in groups:
        group.deliver()
        for layer in group.layers:
            found = gradients(layer, read)
            if not found:
                continue
            gradient = layer.matrix(*found)
            product = group.product(layer, gradient)
            made.append((layer, found, product))
            if kl_clip is not None:
                rate = rates.get(layer.weight, 0.0)
                parts.append(invert.kl_part(gradient, product, rate))
    scale = invert.kl_scale(parts, kl_clip) if kl_clip is not None and parts else 1.0
    for layer, found, product in made:
        invert.write_back(layer, product, found, scale)


def gradients(layer: Layer, read: Read) -> list[Tensor]:
    """Of weight and bias; none unless all of them are there."""
    found = [gradient for p in layer.params if (gradient := read(p)) is not None]
    return found if len(found) == len(layer.params) else []
