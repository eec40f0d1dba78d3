"""K-FAC in a model and an engine: from hooks to preconditioned gradients.

Factors get ready in forward and backward and are packed into buckets, which the
backward pass launches between those of gradients. When a layer's factors have been
summed, those who own it average and invert them, beside the training thread and the
lane. Inverses (or preconditioned gradients) are handed out in groups of layers, which
follow the buckets of gradients. Knows nothing of how gradients are averaged, nor of
when the optimizer steps.

[Note: order of factors] Factors leave in the plan's order, never in the order of
arrival: a bucket that is full waits for those before it, also for the gradients. What a
rank did not have in the last step is not waited for: where nobody has it, it stays so,
and where it comes after its bucket has left, it is left out of this step.

[Note: first step] How often a layer is called is not known in the first step, so its
factors leave after backward only. Before they do, owners and fusion are decided from
the times at which they were there, where the configuration wants that: nothing has to
be moved, as no rank knows any curvature yet.

[Note: new inverses] New inverses are used from the moment at which the training thread
takes delivery of them (or on the lane, where they are used there), not from when they
are made: what is still to be updated with the old ones would otherwise depend on the
clock. And new ones are only made when the last have been completed on the lane, whether
or not anybody took that step (guard: test_loss_scaling_changes_nothing_...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradtide.engine import Engine
from gradtide.kfac import assign, buckets, costs, invert
from gradtide.kfac.buckets import Factor, FactorBucket
from gradtide.kfac.config import KFAC
from gradtide.kfac.costs import Costs
from gradtide.kfac.distributions import servers
from gradtide.kfac.layers import KINDS, Kind, Layer
from gradtide.kfac.parts import Parts, Trained
from gradtide.kfac.sharing import LayerGroup, Read, Roles, gradients, matrix
from gradtide.kfac.stages import Stages, stages
from gradtide.step import Stage


class Preconditioner:
    """The state of K-FAC on one rank.

    `begin` is called when a backward has begun, `launch` when a bucket gets full.

    A step, as the training thread sees it: factors arrive by hooks; `collect` when
    backward has ended; all buckets of `factors` are launched by whoever launches;
    `invert`; then `release` if inverses are held back, and `apply`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: KFAC,
        engine: Engine,
        begin: Callable[[], None],
        launch: Callable[[], None],
        scale: Callable[[], float] | None = None,
        parts: Parts | None = None,
    ) -> None:
        layers = costs.admitted(model, config)
        self.config, self.layers, self.engine = config, list(layers), engine
        self.step = 0  # backward passes that were exchanged
        self.groups: list[LayerGroup] = []
        self.factors: list[FactorBucket] = []
        self._begin_backward, self._launch = begin, launch
        self._collecting = False
        self._local = config.distribution == "dp"
        self._rank, self._size = engine.transport.group
        self.device = layers[0].weight.device
        self._parts = parts or Trained(model, config, self.device, scale)
        self.worker = self._parts.worker
        self._absent: set[Factor] = set()  # in the last step, on this rank
        self._arrived: set[Factor] = set()
        self._open = False  # buffers are in use by this step
        self._inverting = False  # what is summed now is to be inverted
        self._homes: dict[Factor, FactorBucket] = {}
        self.statistics = self._parts.statistics([], self._ready)
        self.place(costs.measure(config, layers, engine, self._parts.inverses))

    def place(self, known: Costs) -> None:
        """Place factors by their costs, and begin with no curvature at all."""
        self._assign(known)
        self._absent, self._arrived, self._open = set(), set(), False
        self.statistics.disarm()
        measured = [layer for layer in self.layers if self._measures(layer)]
        self.statistics = self._parts.statistics(measured, self._ready)
        self._arm()
        self.lay_out(self.layers[::-1], [self.layers])

    def _assign(self, known: Costs) -> None:
        self.costs = known
        self.placed = self._parts.assignment(
            self.config, self.layers, self._size, known, self.engine.transport.carried
        )
        self.curvatures = {
            layer: self._parts.curvature(layer, self._inverted(layer))
            for layer in self.layers
        }

    def _plan(self) -> None:
        """Place factors anew, by when they were ready: see [Note: first step]."""
        times = self.statistics.times()
        self._assign(costs.watched(self.costs, times, self.layers, self.engine))
        self.lay_out(self.layers[::-1], [self.layers])

    def _arm(self) -> None:
        if self.measuring and any(map(self._measures, self.layers)):
            self.statistics.arm()

    def _inverted(self, layer: Layer) -> list[Kind]:
        everywhere = (self._rank, assign.EVERYWHERE)
        return [kind for kind in KINDS if self._owner((layer, kind)) in everywhere]

    def _owner(self, factor: Factor) -> int:
        return self.placed.owner(self.layers.index(factor[0]), factor[1])

    def _message(self, factor: Factor) -> int:
        return self.placed.message(self.layers.index(factor[0]), factor[1])

    def _measures(self, layer: Layer) -> bool:
        return not self._local or bool(self.curvatures[layer].running)

    # - Layout -------------------------------------------------------------------------

    def lay_out(
        self, ready: Sequence[Layer], groups: Sequence[Sequence[Layer]]
    ) -> None:
        """Cut buckets of factors for layers whose gradients get ready in this order.

        `groups` are the layers whose inverses travel together, in the same order. What
        has arrived in this step comes along; nothing may be on its way.
        """
        before, count = self._homes, lambda layer: self.curvatures[layer].numbers()
        self.finish()
        if self._local:
            mine = [layer for layer in ready if self._measures(layer)]
            self.factors, kept = [], buckets.local(mine, count)
        else:
            # With an owner for each factor sums need not go to everybody.
            owned = self.config.distribution == "pad"
            self.factors = kept = [
                bucket
                for kind, layers in (("A", ready[::-1]), ("G", ready))
                for bucket in buckets.lay_out(
                    kind,  # type: ignore[arg-type]
                    layers,
                    self.config,
                    self._owner if owned else None,
                    self._size,
                    count,
                    self._summed,
                    self._message if self.placed.messages else None,
                )
            ]
        self._homes = {(la, home.kind): home for home in kept for la in home.views}
        for factor in self._arrived:
            self._carry(factor, before)
        self._rearm()
        roles = {layer: self._roles(layer) for layer in self.layers}
        group = self.engine.transport.group
        self.groups = [
            LayerGroup(i, members, roles, self.curvatures, self._parts, group)
            for i, members in enumerate(groups)
            if members
        ]
        self._group_of = {la: group for group in self.groups for la in group.layers}

    def _roles(self, layer: Layer) -> Roles:
        a, g = (self._owner((layer, kind)) for kind in KINDS)
        workers = self.placed.workers[self.layers.index(layer)]
        return Roles((a, g), servers(workers, self._size))

    def _carry(self, factor: Factor, before: Mapping[Factor, FactorBucket]) -> None:
        layer = factor[0]
        self._homes[factor].views[layer].copy_(before[factor].views[layer])
        row = self._homes[layer, "G"].rows[layer]
        row.copy_(before[layer, "G"].rows[layer])

    def _rearm(self) -> None:
        for home in set(self._homes.values()):
            home.expect(self._absent)
        for layer, kind in self._arrived - self._absent:
            self._homes[layer, kind].missing -= 1

    # - Factors ------------------------------------------------------------------------

    @property
    def measuring(self) -> bool:
        """Whether this step has factors."""
        return self.step % self.config.factor_every == 0

    def _ready(self, layer: Layer, kind: Kind, factor: Tensor) -> None:
        """A factor of this rank is complete: fp32 [groups, d, d], upper triangle."""
        if kind == "G" and not self._collecting:
            self._begin_backward()  # this hook may be the first
        self._begin()
        home = self._homes[layer, kind]
        if home.stage is Stage.SENT:  # it has left already
            return
        row = self._homes[layer, "G"].rows[layer]
        self.curvatures[layer].take(kind, factor, home.views[layer], row)
        self._arrived.add((layer, kind))
        home.missing -= (layer, kind) not in self._absent
        if self._local:
            if {(layer, "A"), (layer, "G")} <= self._arrived:
                # Its last inverses may be on the lane still, if nobody took that step.
                self._group_of[layer].inverses.finish(self.engine)
                self._average([layer], 1)
        elif not home.missing:
            self._launch()

    def _begin(self) -> None:
        """The first factor of a step: buffers may be used again."""
        if self._open:
            return
        self._open, self._inverting = True, self._inverts
        for home in self._homes.values():
            home.finish(self.engine)
            if home.flow.numbers is not None:
                home.flow.numbers.zero_()

    def leave(self, home: FactorBucket) -> None:
        """A bucket is about to be launched: called by whoever launches it."""
        self._begin()
        home.clear_absent(self._arrived)

    def collect(self) -> None:
        """Backward has ended: take what hooks have not handed out yet."""
        if self.statistics.armed:
            first = self.step == 0 and not self.costs.ready
            if first and self.config.planned and self._size > 1:
                self._plan()
            self._collecting = True
            self._absent = set(self.statistics.finish())
            self._collecting = False

    def _summed(self, layers: Sequence[Layer]) -> None:
        """The sums of both factors of some layers are there (on the lane)."""
        self._average(layers, self._size)

    @torch.no_grad()
    def _average(self, layers: Sequence[Layer], size: int) -> None:
        """Take sums into the averages, and have new inverses made if it is time."""
        for layer in layers:
            curvature = self.curvatures[layer]
            sums = {kind: self._homes[layer, kind].views[layer] for kind in KINDS}
            numbers = self._homes[layer, "G"].rows[layer]
            curvature.average(numbers, sums, size)
            if self._inverting and curvature.running:
                self.worker.submit(layer, curvature.invert)

    # - Inverses -----------------------------------------------------------------------

    @property
    def _inverts(self) -> bool:
        return self.step % self.config.inverse_every == 0

    def invert(self, hold: bool) -> None:
        """All factors of this step have left: let inverses follow, or hold them back.

        The step is over for factors; the next one is prepared for.
        """
        if self._inverts:
            for group in self.groups:
                group.inverses.finish(self.engine)
                group.inverses.launch(self.engine, hold)
        if self.measuring:
            # From what is launched on the lane: after the flags of this step were read.
            self._open, self._arrived = False, set()
            self._rearm()
        self.step += 1
        self._arm()

    def settle(self) -> None:
        """Let go of what was held for a step that nobody took."""
        for group in self.groups:
            group.inverses.release(self.engine)

    def finish(self) -> None:
        """Wait for all that is on its way."""
        self.settle()
        for home in self.factors:
            home.finish(self.engine)
        for group in self.groups:
            group.inverses.finish(self.engine)

    # - Gradients ----------------------------------------------------------------------

    def release(self, group: LayerGroup, read: Read) -> None:
        """Let a group's inverses travel, and what is made of its gradients.

        `read` gives gradients on the lane when it comes to that.
        """
        group.inverses.release(self.engine)
        if group.products is not None:
            group.products.finish(self.engine)
            group.read = read
            group.products.launch(self.engine)

    @torch.no_grad()
    def apply(
        self,
        groups: Sequence[LayerGroup],
        read: Read,
        rate: Callable[[nn.Parameter], float],
    ) -> None:
        """Precondition the gradients of some released groups in place.

        `rate` is a parameter's learning rate. With `kl_clip` these are all groups.
        """
        made: list[tuple[Layer, Tensor]] = []
        parts: list[Tensor] = []
        for group in groups:
            group.inverses.finish(self.engine)  # see [Note: new inverses]
            if group.products is not None:
                group.products.finish(self.engine)
            for layer in group.layers:
                gradient = matrix(layer, read)
                if gradient is None:
                    continue
                product = group.product(layer, gradient)
                made.append((layer, product))
                if self.config.kl_clip is not None:
                    lr = rate(layer.weight)
                    parts.append(invert.kl_part(gradient, product, lr))
        scale: Tensor | float = 1.0
        if parts and self.config.kl_clip is not None:
            scale = invert.kl_scale(invert.total(parts), self.config.kl_clip)
        for layer, product in made:
            weight, bias = gradients(layer, read)
            assert weight is not None
            invert.write_back(layer, product, weight, bias, scale)

    def jump(self, step: int) -> None:
        """Go on as if so many steps had been taken."""
        self.step = step
        self.statistics.disarm()
        self._arm()

    def stages(self) -> Stages:
        """Busy seconds of this rank since the engine's records were last cleared, and
        of its own since `clear`."""
        return stages(
            self.engine.telemetry.records, self.statistics.seconds, self.worker.seconds
        )

    def clear(self) -> None:
        """Forget the seconds that `stages` tells of, with the engine's records."""
        self.engine.telemetry.clear()
        self.statistics.seconds = self.worker.seconds = 0.0

    def close(self) -> None:
        self.statistics.disarm()
        self.worker.close()
