"""K-FAC in a model and an engine: from hooks to preconditioned gradients.

Factors get ready in forward and backward and are packed into buckets, which the
backward pass launches between those of gradients. When a layer's factors have been
summed, those who own it average and invert them, beside the training thread and the
queue. Inverses (or preconditioned gradients) are handed out in groups of layers, which
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
takes delivery of them (or on the queue, where they are used there), not from when they
are made: what is still to be updated with the old ones would otherwise depend on the
clock. And new ones are only made when the last are complete on the queue, whether or
not anybody took that step (guard: test_loss_scaling_changes_nothing_...).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from gradtide.core.engine import Engine
from gradtide.core.step import Stage
from gradtide.kfac import costs
from gradtide.kfac.assign import EVERYWHERE, Assignment
from gradtide.kfac.buckets import FactorBucket, runs
from gradtide.kfac.config import KFAC
from gradtide.kfac.costs import Costs
from gradtide.kfac.curvature import Curvature
from gradtide.kfac.distributions import servers
from gradtide.kfac.layers import KINDS, Factor, Kind, Layer, sequence
from gradtide.kfac.parts import Parts, Trained
from gradtide.kfac.sharing import LayerGroup
from gradtide.kfac.stages import Stages, stages


class Preconditioner:
    """The state of K-FAC on one rank.

    `begin` is called when a backward has begun, `launch` when a bucket gets full.

    A step, as the training thread sees it: factors arrive by hooks; `collect` when
    backward has ended; all buckets of `factors` are launched by whoever launches;
    `invert`; then groups are released, and `sharing.precondition`ed with. Before the
    first one, and after `place`, comes `lay_out`.
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
        self.config, self.engine = config, engine
        self.layers = costs.admitted(model, config)
        self.step = 0  # backward passes that were exchanged
        self.groups: list[LayerGroup] = []
        self.factors: list[FactorBucket] = []
        self._begin_backward, self._launch = begin, launch
        self._collecting = False
        self._local = config.distribution == "dp"
        device = self.layers[0].weight.device
        self._parts = parts or Trained(model, config, device, scale)
        self.worker = self._parts.worker
        self._buckets: dict[Factor, FactorBucket] = {}
        self._inverting = False  # what is summed now is to be inverted
        self.statistics = self._parts.statistics([], self._ready)
        known = costs.measure(config, self.layers, engine, self._parts.inverses)
        self.place(known)

    # - Layout -------------------------------------------------------------------------

    def place(self, known: Costs) -> None:
        """Place factors by their costs, and begin with no curvature at all."""
        self._assign(known)
        self._arrived: set[Factor] = set()
        self._open = False  # buffers are in use by this step
        self.statistics.disarm()
        self._measured = [
            la for la in self.layers if self.curvatures[la].running or not self._local
        ]
        self.statistics = self._parts.statistics(self._measured, self._ready)
        self.statistics.trains = self.engine.transport.progress.may_train
        self._arm()

    def _assign(self, known: Costs) -> None:
        self.costs, rank, size = known, self.engine.group.rank, self.engine.group.size
        assign, carried = self._parts.assignment, self.engine.transport.carried
        self.placed: Assignment = assign(self.config, self.layers, size, known, carried)
        factors = sequence(self.layers)
        self.owners = dict(zip(factors, self.placed.owners, strict=True))
        self.curvatures: dict[Layer, Curvature] = {}
        for layer in self.layers:
            kinds = [k for k in KINDS if self.owners[layer, k] in (rank, EVERYWHERE)]
            self.curvatures[layer] = self._parts.curvature(layer, kinds)

    def _arm(self) -> None:
        if self.measuring and self._measured:
            self.statistics.arm()

    def lay_out(
        self, ready: Sequence[Layer], groups: Sequence[Sequence[Layer]]
    ) -> None:
        """Cut buckets of factors for layers whose gradients get ready in this order.

        `groups` are the layers whose inverses travel together, in the same order. What
        has arrived in this step comes along; nothing may be on its way.
        """
        before, size = self._buckets, self.engine.group.size
        self.finish()
        how = self.config, self.owners, size
        if self._local:
            own = product(self._measured, KINDS)
            buckets = [FactorBucket("", kind, [layer], *how) for layer, kind in own]
        else:
            factors, messages = sequence(self.layers), self.placed.messages
            together = dict(zip(factors, messages, strict=True)) if messages else {}
            buckets = self.factors = [
                FactorBucket(f"kfac.{kind}{i}", kind, run, *how, self._average)
                for kind, layers in zip(KINDS, (ready[::-1], ready), strict=True)
                for i, run in enumerate(runs(kind, layers, self.config, together))
            ]
        self._buckets = {
            (la, bucket.kind): bucket for bucket in buckets for la in bucket.views
        }
        for layer, kind in self._arrived:
            old = before[layer, kind].views[layer]
            self._buckets[layer, kind].views[layer].copy_(old)
            old = before[layer, "G"].rows[layer]
            self._buckets[layer, "G"].rows[layer].copy_(old)
        self._expect()
        workers = zip(self.layers, self.placed.workers, strict=True)
        served = {layer: servers(ranks, size) for layer, ranks in workers}
        who = self.owners, served, self.curvatures, self._parts, self.engine
        self.groups = [LayerGroup(i, group, *who) for i, group in enumerate(groups)]
        self._group_of = {la: group for group in self.groups for la in group.layers}

    def _expect(self) -> None:
        """Wait for every factor anew, but those that are there."""
        for bucket in self._buckets.values():
            bucket.missing = sum(
                (la, bucket.kind) not in self._arrived for la in bucket.views
            )

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
        bucket = self._buckets[layer, kind]
        if bucket.stage is Stage.SENT:  # it has left already
            return
        row = self._buckets[layer, "G"].rows[layer]
        self.curvatures[layer].take(kind, factor, bucket.views[layer], row)
        self._arrived.add((layer, kind))
        bucket.missing -= 1
        if self._local:
            if {(layer, "A"), (layer, "G")} <= self._arrived:
                # Its last inverses may be on the queue still, if nobody took that step.
                self._group_of[layer].finish()
                self._average([layer])
        elif not bucket.missing:
            self._launch()

    def _begin(self) -> None:
        """The first factor of a step: buffers may be used again."""
        if self._open:
            return
        self._open, self._inverting = True, self.inverting
        for bucket in self._buckets.values():
            bucket.finish(self.engine)
            if bucket.flow.numbers is not None:
                bucket.flow.numbers.zero_()

    def leave(self, bucket: FactorBucket) -> None:
        """A bucket is about to be launched: called by whoever launches it.

        This rank adds nothing to the sums of what it has nothing for.
        """
        self._begin()
        for layer, view in bucket.views.items():
            if (layer, bucket.kind) not in self._arrived:
                view.zero_()

    def collect(self) -> None:
        """Backward has ended: take what hooks have not handed out yet."""
        if not self.statistics.armed:
            return
        first = self.step == 0 and not self.costs.ready
        if first and self.config.planned and self.engine.group.size > 1:
            # Placed anew, by when rank 0's factors were ready: see [Note: first step].
            times = self.statistics.times()
            ready = tuple(times[la, kind] for kind in KINDS for la in self.layers)
            ready = self.engine.transport.gather_objects(ready)[0]
            self._assign(replace(self.costs, ready=ready))
        self._collecting = True
        self.statistics.finish()
        self._collecting = False

    @torch.no_grad()
    def _average(self, layers: Sequence[Layer]) -> None:
        """On the queue: average the sums of both factors; invert them if it is time."""
        size = 1 if self._local else self.engine.group.size
        rows = [self._buckets[layer, "G"].rows[layer] for layer in layers]
        for layer, numbers in zip(layers, self._parts.told(rows), strict=True):
            curvature = self.curvatures[layer]
            sums = {kind: self._buckets[layer, kind].views[layer] for kind in KINDS}
            curvature.average(numbers, sums, size)
            if self._inverting and curvature.running:
                self.worker.submit(layer, curvature.invert)

    # - Inverses -----------------------------------------------------------------------

    @property
    def inverting(self) -> bool:
        """Whether this step makes new inverses."""
        return self.step % self.config.inverse_every == 0

    def invert(self, hold: bool) -> None:
        """All factors of this step have left: let inverses follow, or hold them back.

        The step is over for factors; the next one is prepared for.
        """
        if self.inverting:
            for group in self.groups:
                group.launch(hold)
        if self.measuring:
            # From what the queue launches: after the flags of this step were read.
            self._open, self._arrived = False, set()
            self._expect()
        self.step += 1
        self._arm()

    def release_inverses(self) -> None:
        """Let go of what was held for a step that nobody took."""
        for group in self.groups:
            group.release_inverses()

    def finish(self) -> None:
        """Wait for all that is on its way."""
        self.release_inverses()
        for bucket in self.factors:
            bucket.finish(self.engine)
        for group in self.groups:
            group.finish()

    # - A run --------------------------------------------------------------------------

    def jump(self, step: int) -> None:
        """Go on as if so many steps had been taken."""
        self.step = step
        self.statistics.disarm()
        self._arm()

    def stages(self) -> Stages:
        """Busy seconds of this rank since `clear`."""
        records = self.engine.telemetry.records
        return stages(records, self.statistics.seconds, self.worker.seconds)

    def clear(self) -> None:
        """Forget the seconds that `stages` tells of, with the engine's records."""
        self.engine.telemetry.clear()
        self.statistics.seconds = self.worker.seconds = 0.0

    def close(self) -> None:
        self.statistics.disarm()
        self.worker.close()
