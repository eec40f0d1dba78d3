"""Parameters that begin, end or change in the middle of a run: what of it stays.

A training is laid out anew for the parameters that there are now. What buckets have of
those that stay is carried over as where buckets are cut anew (`GradientBucket.carry`):
residuals, velocities and numbers of steps. A parameter stays that is the same object;
or that has the name and shape of one which the model has no more, in whose place it is.
One that has another shape now, as an embedding that has grown, begins anew.

The residual of a parameter that is frozen is kept here until that is trained again.
That of one which the model has no more is lost with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.core.payload import count_on, counts
from gradtide.runtime.layout.buckets import FLAT, GradientBucket, Place
from gradtide.runtime.layout.parameters import averaged
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.training import Training
from gradtide.transport.shards import local

Stays: TypeAlias = Mapping[nn.Parameter, Place]  # where parameters were before


@dataclass
class Changes:
    """What is different, by name; of what is lost the residual's norm on this rank."""

    begun: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    gone: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lost = [f"{name} ({norm:.3g})" for name, norm in self.gone.items() if norm]
        told = {
            "trained from now on": self.begun,
            "trained no more": [*self.frozen, *self.gone],
            "lost, with a residual of that norm": lost,
        }
        words = [f"{what}: {', '.join(names)}" for what, names in told.items() if names]
        return "; ".join(words) or "the same parameters are trained"


def staying(training: Training) -> Stays:
    """The parameters that are trained now and were before, with their places."""
    places, model = training.placement.places, training.model
    there, by_name = (
        set(model.parameters()),
        {place.slot.name: place for place in places.values()},
    )
    found: dict[nn.Parameter, Place] = {}
    for name, p in averaged(model):
        before = by_name.get(name)
        if p in places and places[p].shape == local(p).shape:
            found[p] = places[p]
        elif before is not None and before.slot.param not in there:
            own = before.slot.local
            if (own.shape, own.dtype) == (local(p).shape, p.dtype):
                found[p] = before
    return found


def refuse_reshaped(training: Training) -> None:
    """Raise ValueError for a parameter in another shape, of which a round has steps."""
    for p, place in training.placement.places.items():
        if local(p).shape != place.shape:
            raise ValueError(
                f"refresh(): {place.slot.name} had the shape {tuple(place.shape)} when "
                f"this round began, and has {tuple(local(p).shape)} now: with rounds, "
                "call end_round() and remove() before such a change, and replicate() "
                "after it, on every rank"
            )


@contextmanager
def in_place(optimizers: Iterable[Optimizer], stays: Stays) -> Iterator[None]:
    """Have optimizers step parameters, with their state, in the place of former ones.

    If what is done inside raises, they have the former ones again.
    """
    new = {place.slot.param: p for p, place in stays.items()}
    new = {before: p for before, p in new.items() if before is not p}
    moves = [(optimizer, _missing(optimizer, new)) for optimizer in optimizers]
    for optimizer, own in moves:
        _replace(optimizer, own)
    try:
        yield
    except BaseException:
        for optimizer, own in moves:
            _replace(optimizer, {p: before for before, p in own.items()})
        raise


def _missing(
    optimizer: Optimizer, new: Mapping[nn.Parameter, nn.Parameter]
) -> Mapping[nn.Parameter, nn.Parameter]:
    """What it does not hold of the new ones; a program may have made it anew itself."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    return {before: p for before, p in new.items() if before in held and p not in held}


def _replace(optimizer: Optimizer, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for group in optimizer.param_groups if new else ():
        group["params"] = [new.get(p, p) for p in group["params"]]
    for before, p in new.items():
        if before in optimizer.state:
            optimizer.state[p] = optimizer.state.pop(before)


class Aside:
    """Residuals of parameters that the model has, and that are not trained now."""

    def __init__(self) -> None:
        self._residuals: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def take(self, before: Training, stays: Stays) -> Changes:
        """Take the residuals of those that stay no longer."""
        there = set(before.model.parameters())
        self._residuals = {p: x for p, x in self._residuals.items() if p in there}
        known = {place.slot.param for place in stays.values()}
        changes = Changes([n for n, p in averaged(before.model) if p not in stays])
        for p, place in before.placement.places.items():
            bucket, slot = place.bucket, place.slot
            if p in known:
                continue
            if local(p).shape != place.shape:
                bucket.waiting.pop(slot, None)  # it would be read by the new shape
            residual = bucket.residual_of(slot)
            if p in there and local(p).shape == place.shape:
                changes.frozen.append(slot.name)
                self._residuals[p] = residual
            else:
                norm = torch.linalg.vector_norm(residual.float())
                changes.gone[slot.name] = float(norm)
        return changes

    @torch.no_grad()
    def carry(self, before: Training, after: Training, stays: Stays) -> None:
        """Have a new training go on from one before it, when nothing is under way."""
        counted = counts(before.placement.buckets[0].payload.state)
        for bucket in after.placement.buckets:
            places = [
                stays.get(slot.param) or self._begin(bucket, slot, counted)
                for slot in bucket.slots
            ]
            bucket.carry(places, same=True)
        _agree(before, after, stays)

    def _begin(
        self, bucket: GradientBucket, slot: Slot, counted: Mapping[str, int]
    ) -> Place:
        """Where a parameter was that was not trained: in a bucket of its own."""
        own = Slot(slot.name, slot.param, 0)
        flat = bucket.payload.flat.new_zeros(slot.local.numel())
        alone = GradientBucket([own], flat, bucket.collective)
        count_on(alone.payload.state, counted)
        residual = self._residuals.pop(slot.param, None)
        if residual is not None and residual.shape == slot.local.shape:
            # In the order of memory, as in a bucket.
            own.of(flat).copy_(residual)
            alone.waiting[own] = {FLAT: flat.clone()}
            flat.zero_()
        return Place(alone, own)


def _agree(before: Training, after: Training, stays: Stays) -> None:
    """Where steps are exchanged: go on from what all ranks have alike now."""
    old, new = before.actions.consensus, after.actions.consensus
    if old is None or new is None:
        return
    if not old.begun:
        new.averaged |= old.averaged
        return
    new.shared = {
        slot.param: torch.empty_like(slot.local).copy_(slot.local)
        for slot in after.placement.slots
    }
    new.velocity = {
        p: old.velocity[place.slot.param]
        for p, place in stays.items()
        if place.slot.param in old.velocity
    }
    new.resume()
    new.to_widen = old.to_widen
    after.actions.turn_to(after.actions.chosen.now())
