"""Where factors stand between gradients: K-FAC in terms of gradient buckets.

Knows the layout of gradients and the preconditioner; nothing of hooks or of when
anything leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.core.engine import InFlight
from gradtide.kfac.buckets import FactorBucket
from gradtide.kfac.costs import Costs
from gradtide.kfac.layers import Layer
from gradtide.kfac.preconditioner import Preconditioner
from gradtide.kfac.sharing import LayerGroup, Read, precondition
from gradtide.runtime.checkpoint import StateDict, packed, unpacked
from gradtide.runtime.exchange.unpreconditioned import Places
from gradtide.runtime.layout.buckets import GradientBucket

Launchable: TypeAlias = GradientBucket | FactorBucket


class SavedFactors(NamedTuple):
    """Of a state that this rank has read: of how many ranks, and what is to load."""

    size: int
    states: list[dict[str, Any]]


class Preconditioning:
    """What leaves in which order, and which layers go with which bucket of gradients.

    A group of layers belongs to the bucket that is the last to arrive in forward order
    of those that hold a gradient of it: a layer may be cut between its weight and bias.
    `read` tells a parameter's gradient where there are no real ones.
    """

    def __init__(
        self, placement: Places, kfac: Preconditioner, read: Read | None = None
    ) -> None:
        self.kfac, self._placement, self._read = kfac, placement, read
        self._group = kfac.engine.group
        self.leave, self.collect, self.invert = kfac.leave, kfac.collect, kfac.invert
        self.release_inverses, self.finish = kfac.release_inverses, kfac.finish
        # On the queue a mean is there before anybody has taken delivery of it.
        self._in_flight: dict[GradientBucket, InFlight | None] = {}
        self.groups: dict[GradientBucket, LayerGroup] = {}
        self._followed: tuple[object, object] = (None, None)
        self._plan: tuple[object, list[Launchable]] = (None, [])
        self._pending: list[LayerGroup] = []  # released, and not preconditioned yet
        self._rates: dict[nn.Parameter, float] = {}
        self.follow()

    def follow(self) -> None:
        """Lay factors out as the buckets of gradients are now."""
        buckets, placed = self._placement.buckets, self.kfac.placed
        if self._followed[0] is buckets and self._followed[1] is placed:
            return
        self._followed = buckets, placed
        ready = sorted(self.kfac.layers, key=self._position)
        members: dict[GradientBucket, list[Layer]] = {bucket: [] for bucket in buckets}
        for layer in ready:
            members[min(self._of(layer), key=buckets.index)].append(layer)
        owners = [bucket for bucket in buckets if members[bucket]]
        self.kfac.lay_out(ready, [members[bucket] for bucket in owners])
        self.groups = dict(zip(owners, self.kfac.groups, strict=True))

    def plan(self) -> list[Launchable]:
        """All that is to be launched in this step, in order."""
        self.follow()
        key = self._placement.buckets, self.kfac.factors, self.kfac.step
        if self._plan[0] == key:
            return self._plan[1]
        factors = self.kfac.factors if self.kfac.measuring else []
        plan: list[Launchable] = [*self._placement.buckets, *factors]
        if self.kfac.config.early:
            # A layer's G is there just before its gradient; sorting keeps that order.
            plan = sorted([*factors, *self._placement.buckets], key=self._ready_at)
        self._plan = key, plan
        return plan

    def _ready_at(self, bucket: Launchable) -> int:
        if isinstance(bucket, GradientBucket):
            return bucket.slots[-1].position
        return -1 if bucket.kind == "A" else max(map(self._position, bucket.views))

    def _position(self, layer: Layer) -> int:
        return max(self._placement.places[p].slot.position for p in layer.params)

    def _of(self, layer: Layer) -> set[GradientBucket]:
        return {self._placement.places[p].bucket for p in layer.params}

    # - State --------------------------------------------------------------------------

    def blank(self, saved: StateDict) -> None:
        """Add places for the states of other ranks; with as many as now, this one's."""
        if saved["world_size"] == self._group.size:
            self.save(saved)
            return
        for rank in range(saved["world_size"]):
            saved.setdefault(f"rank{rank}", {})["preconditioner"] = b""

    def save(self, saved: StateDict) -> None:
        """Add this rank's state to what is saved.

        It is one opaque piece: averages of the factors that this rank inverts, the
        traces of all, and inverses where the next step does not make new ones.
        """
        self.kfac.finish()
        due, curvatures = self.kfac.inverting, self.kfac.curvatures
        state = {
            "step": self.kfac.step,
            "costs": asdict(self.kfac.costs),
            "layers": {layer.name: own.save(due) for layer, own in curvatures.items()},
        }
        saved[f"rank{self._group.rank}"]["preconditioner"] = packed(state)

    def read(self, saved: Mapping[str, Any]) -> SavedFactors:
        """What `load` needs: this rank's state, or all, after another number of ranks.

        There are none of a run without K-FAC. Raises ValueError for what does not fit.
        """
        size, group = int(saved["world_size"]), self._group
        ranks = [group.rank] if size == group.size else list(range(size))
        pieces = [saved.get(f"rank{r}", {}).get("preconditioner") for r in ranks]
        if all(piece is None for piece in pieces):
            return SavedFactors(size, [])
        for rank, piece in zip(ranks, pieces, strict=True):
            if not piece:
                raise ValueError(
                    f"the state has no 'rank{rank}', or not its 'preconditioner': "
                    f"K-FAC's factors are spread over all {size} ranks that saved it; "
                    "put the states of all in one dictionary"
                )
        states: list[dict[str, Any]] = [
            unpacked(piece, f"K-FAC's factors (rank{rank})")
            for rank, piece in zip(ranks, pieces, strict=True)
        ]
        numels = {(la.name, kind): la.numel(kind) for la, kind in self.kfac.owners}
        for state in states:
            for name, own in state["layers"].items():
                for kind, value in own["running"].items():
                    if numels.get((name, kind)) != value.numel():
                        raise ValueError(
                            f"the state holds K-FAC's factor {kind} of {name!r}, which "
                            "this model does not have in that size: build the model "
                            "that was saved"
                        )
        return SavedFactors(size, states)

    def confirm(self, found: SavedFactors) -> SavedFactors:
        return found

    def load(self, found: SavedFactors) -> None:
        """Go on from what `read` returned.

        Another number of ranks, or another distribution, takes each part of it from
        whichever rank had it.
        """
        states = found.states
        if not states:
            return
        self.kfac.finish()
        self.kfac.step = int(states[0]["step"])
        same = found.size == self._group.size
        self.kfac.place(Costs(**states[0]["costs"]) if same else self.kfac.costs)
        for layer, curvature in self.kfac.curvatures.items():
            for state in states:
                if layer.name in state["layers"]:
                    curvature.load(state["layers"][layer.name])
        self.follow()

    # - Steps --------------------------------------------------------------------------

    def precondition(self, optimizer: Optimizer) -> None:
        """Precondition all gradients at once, in `.grad`."""
        self.defer(optimizer)
        places, groups = self._placement.places, self._pending
        read = self._read or (lambda p: p.grad if p in places else None)
        for group in groups:
            group.release(read)
        self._precondition(groups, read)

    def defer(self, optimizer: Optimizer) -> None:
        """Gradients will be preconditioned a bucket at a time.

        Learning rates are noted now: LR schedulers run before a deferred update.
        """
        if hasattr(optimizer, "found_inf"):  # a fused one, called by a GradScaler
            self.check_scale()
        # A fused optimizer unscales gradients itself: they are larger by this here.
        scale = getattr(optimizer, "grad_scale", None)
        by = 1.0 if scale is None else float(scale)
        self._rates = {
            p: float(group.get("lr", 1.0)) / by
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._pending = list(self.groups.values())
        self._in_flight = {bucket: bucket.flight for bucket in self._placement.buckets}

    def release(self, bucket: GradientBucket) -> None:
        """Let go of what a bucket that was just released needs."""
        places, flights = self._placement.places, self._in_flight

        def read(p: nn.Parameter) -> Tensor:  # on the queue
            flight = flights[places[p].bucket]
            assert flight is not None
            return places[p].slot.of(flight.mean)

        if bucket in self.groups:
            self.groups[bucket].release(self._read or read)

    def check_scale(self) -> None:
        """Raise RuntimeError if a GradScaler is at work that K-FAC was not told of."""
        self.kfac.statistics.check_scale()

    def _groups(self, bucket: GradientBucket) -> list[LayerGroup]:
        """The groups to precondition before the update of a bucket.

        These are all, if K-FAC clips by a sum over all layers.
        """
        together = self.kfac.config.kl_clip is not None
        return [
            group
            for group in self._pending
            if together or any(bucket in self._of(layer) for layer in group.layers)
        ]

    def needs(self, bucket: GradientBucket) -> set[GradientBucket]:
        """The buckets whose means it takes to precondition those of this one."""
        layers = (la for group in self._groups(bucket) for la in group.layers)
        return {other for layer in layers for other in self._of(layer)}

    def update(self, bucket: GradientBucket) -> None:
        """Precondition the gradients of the layers in a bucket, once."""
        read = self._read
        if read is None:
            read = {
                slot.param: mean
                for other in self.needs(bucket)
                for slot, mean in zip(other.slots, other.delivered(), strict=True)
                if slot.wanted
            }.get
        self._precondition(self._groups(bucket), read)

    def _precondition(self, groups: list[LayerGroup], read: Read) -> None:
        self._pending = [group for group in self._pending if group not in groups]
        precondition(groups, read, self._rates, self.kfac.config.kl_clip)


def preconditioned(placement: Places, *how: Any) -> Preconditioning:
    """The stage of a training; `how` is what a `Preconditioner` is made of."""
    return Preconditioning(placement, Preconditioner(*how))
