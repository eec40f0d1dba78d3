"""Where factors stand between gradients: K-FAC in terms of gradient buckets.

Knows the layout of gradients and the preconditioner; nothing of hooks or of when
anything leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from torch import nn
from torch.optim import Optimizer

from gradtide.gradients import GradientBucket, Place
from gradtide.kfac import state
from gradtide.kfac.buckets import FactorBucket
from gradtide.kfac.layers import Layer
from gradtide.kfac.preconditioner import Preconditioner
from gradtide.kfac.sharing import LayerGroup, Read
from gradtide.ops import Group

Launchable: TypeAlias = GradientBucket | FactorBucket


class Places(Protocol):
    """Where gradients go: a `Placement`, or what a planner knows of one."""

    @property
    def buckets(self) -> list[GradientBucket]: ...

    @property
    def places(self) -> Mapping[nn.Parameter, Place]: ...


class Preconditioning:
    """What leaves in which order, and which layers go with which bucket of gradients.

    A group of layers belongs to the bucket that is the last to arrive in forward order
    of those that hold a gradient of it: a layer may be cut between its weight and bias.
    """

    def __init__(self, placement: Places, kfac: Preconditioner) -> None:
        self.kfac, self._placement = kfac, placement
        self.groups: dict[GradientBucket, LayerGroup] = {}
        self._followed: tuple[object, object] = (None, None)
        self._plan: tuple[object, list[Launchable]] = (None, [])
        self._pending: set[LayerGroup] = set()  # released, and not preconditioned yet
        self._rates: dict[int, float] = {}  # by id of a parameter
        self.follow()

    def follow(self) -> None:
        """Lay factors out as the buckets of gradients are now."""
        buckets, placed = self._placement.buckets, self.kfac.placed
        if self._followed[0] is buckets and self._followed[1] is placed:
            return
        self._followed = buckets, placed
        ready = sorted(self.kfac.layers, key=self._position)
        number = {bucket: i for i, bucket in enumerate(buckets)}
        members: list[list[Layer]] = [[] for _ in buckets]
        for layer in ready:
            members[min(number[bucket] for bucket in self._of(layer))].append(layer)
        self.kfac.lay_out(ready, [group for group in members if group])
        owners = [b for b, group in zip(buckets, members, strict=True) if group]
        self.groups = dict(zip(owners, self.kfac.groups, strict=True))

    def plan(self) -> list[Launchable]:
        """All that is to be launched in this step, in order."""
        key = self._placement.buckets, self.kfac.factors, self.kfac.step
        if self._plan[0] != key:
            self._plan = key, self._planned()
        return self._plan[1]

    def _planned(self) -> list[Launchable]:
        self.follow()
        buckets: list[Launchable] = list(self._placement.buckets)
        factors = self.kfac.factors if self.kfac.measuring else []
        if not self.kfac.config.early:
            return [*buckets, *factors]
        a = [bucket for bucket in factors if bucket.kind == "A"]
        g = [bucket for bucket in factors if bucket.kind == "G"]
        # A layer's G is there just before its gradient; sorting keeps equals in order.
        return [*a, *sorted([*g, *buckets], key=self._ready_at)]

    def _ready_at(self, bucket: Launchable) -> int:
        if isinstance(bucket, GradientBucket):
            return max(slot.position for slot in bucket.slots)
        return max(map(self._position, bucket.views))

    def _position(self, layer: Layer) -> int:
        return max(self._placement.places[p].slot.position for p in layer.params)

    def _of(self, layer: Layer) -> set[GradientBucket]:
        return {self._placement.places[p].bucket for p in layer.params}

    # - State --------------------------------------------------------------------------

    def save(self, saved: dict[str, Any], group: Group) -> None:
        """Add this rank's state to what is saved, or places for that of other ranks."""
        if saved["world_size"] == group.size:
            saved[f"rank{group.rank}"]["preconditioner"] = state.save(self.kfac)
            return
        for rank in range(saved["world_size"]):
            saved.setdefault(f"rank{rank}", {})["preconditioner"] = b""

    def read(self, saved: Mapping[str, Any], group: Group) -> list[dict[str, Any]]:
        """What `load` needs: this rank's state, or after another number of ranks those
        of all; none, of a run without K-FAC. Raises ValueError for what does not fit.
        """
        size = int(saved["world_size"])
        ranks = [group.rank] if size == group.size else list(range(size))
        pieces = [saved.get(f"rank{r}", {}).get("preconditioner") for r in ranks]
        if all(piece is None for piece in pieces):
            return []
        for rank, piece in zip(ranks, pieces, strict=True):
            if piece is None:
                raise ValueError(
                    f"the state has no 'rank{rank}': K-FAC's factors are spread over "
                    f"all {size} ranks that saved it; put the states of all in one "
                    "dictionary"
                )
        return state.read(pieces, self.kfac)

    def load(
        self, states: list[dict[str, Any]], saved: Mapping[str, Any], group: Group
    ) -> None:
        """Go on from what `read` returned."""
        state.load(self.kfac, states, int(saved["world_size"]) == group.size)
        self.follow()

    # - Steps --------------------------------------------------------------------------

    def note(self, optimizer: Optimizer) -> None:
        """Note learning rates: LR schedulers run before a deferred update."""
        if hasattr(optimizer, "found_inf"):  # a fused one, called by a GradScaler
            self.kfac.statistics.check_scale()
        # A fused optimizer unscales gradients itself: they are larger by this here.
        scale = getattr(optimizer, "grad_scale", None)
        by = 1.0 if scale is None else float(scale)
        self._rates = {
            id(p): float(group.get("lr", 1.0)) / by
            for group in optimizer.param_groups
            for p in group["params"]
        }

    def _rate(self, p: nn.Parameter) -> float:
        return self._rates.get(id(p), 0.0)

    def precondition(self, optimizer: Optimizer, read: Read) -> None:
        """Precondition all gradients at once."""
        self.note(optimizer)
        groups = list(self.groups.values())
        for group in groups:
            self.kfac.release(group, read)
        self.kfac.apply(groups, read, self._rate)

    def defer(self, optimizer: Optimizer) -> None:
        """Gradients will be preconditioned a bucket at a time."""
        self.note(optimizer)
        self._pending = set(self.groups.values())

    def release(self, bucket: GradientBucket, read: Read) -> None:
        """Let go of what a bucket that was just released needs. `read`: on the lane."""
        if bucket in self.groups:
            self.kfac.release(self.groups[bucket], read)

    def _groups(self, bucket: GradientBucket) -> list[LayerGroup]:
        """The groups to precondition before the update of a bucket: all, if K-FAC clips
        by a sum over all layers."""
        if self.kfac.config.kl_clip is not None:
            return [g for g in self.groups.values() if g in self._pending]
        return [
            group
            for group in self.groups.values()
            if group in self._pending
            and any(bucket in self._of(layer) for layer in group.layers)
        ]

    def needs(self, bucket: GradientBucket) -> set[GradientBucket]:
        """The buckets whose means it takes to precondition those of this one."""
        layers = (la for group in self._groups(bucket) for la in group.layers)
        return {other for layer in layers for other in self._of(layer)}

    def update(self, bucket: GradientBucket, read: Read) -> None:
        """Precondition the gradients of the layers in a bucket, once."""
        groups = self._groups(bucket)
        if groups:
            self._pending.difference_update(groups)
            self.kfac.apply(groups, read, self._rate)
