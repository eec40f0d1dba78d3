"""What has to be saved of a round, and the parameters that ranks agreed on last.

Between exchanges every rank has parameters and buffers of its own. All ranks have in
common what they agreed on last, the outer optimizer's momentum, how far the round is,
and means that have arrived and are not applied yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradtide.core.step import Stage
from gradtide.core.torch_internals import foreach_copy_
from gradtide.runtime.checkpoint import own_key, packed, unpacked
from gradtide.runtime.layout.broadcast import digest
from gradtide.runtime.layout.parameters import shared_buffers
from gradtide.transport.shards import local

if TYPE_CHECKING:
    from gradtide.runtime.training import Training

Named = dict[str, Tensor]


@dataclass(frozen=True)
class SavedRound:
    """Of a state that this rank has read; `own` is empty with other ranks than now."""

    position: int
    shared: Named
    velocity: Named
    means: Named  # that have arrived, and are not applied yet
    own: Mapping[str, Named]  # parameters, buffers, what was done to them, and to which


def common_key(training: Training) -> str:
    """Where the ranks have what they agree on; of shards, those with the same part."""
    group = training.engine.group
    return own_key(training.placement, group).replace(f"rank{group.rank}", "round")


def save(training: Training, saved: dict[str, Any]) -> None:
    """Add a round to a state of this rank's; nothing may leave or arrive meanwhile."""
    steps, rank = training.steps, own_key(training.placement, training.engine.group)
    if steps is None or not steps.rounds:
        return
    if not steps.on:  # keys into which a checkpoint can be read
        saved[common_key(training)] = saved[rank]["round"] = packed({})
        return
    named = {slot.name: slot.param for slot in training.placement.slots}
    shared, velocity, moved = (
        {name: found[p] for name, p in named.items() if p in found}
        for found in (steps.shared, steps.velocity, steps.moved)
    )
    saved[common_key(training)] = packed(
        {
            "position": training.step.position,
            "shared": shared,
            "velocity": velocity,
            "means": {
                slot.name: mean.clone()
                for bucket in training.buckets
                if bucket.stage is Stage.SENT
                for slot, mean in zip(bucket.slots, bucket.gradients, strict=True)
            },
        }
    )
    own = {
        "parameters": {name: local(p).clone() for name, p in named.items()},
        "buffers": {name: b.clone() for name, b in shared_buffers(training.model)},
        "moved": moved,
        "changed": {
            n: torch.empty(0, dtype=torch.float32, device="cpu")
            for n, p in named.items()
            if p in steps.changed
        },
    }
    saved[rank]["round"] = packed(own)


def read(training: Training, saved: Mapping[str, Any]) -> SavedRound | None:
    """What a state says of a round; None if it says nothing. Changes nothing.

    Raises whatever comes of a state that is not whole.
    """
    steps, group = training.steps, training.engine.group
    if steps is None or common_key(training) not in saved:
        return None
    common = unpacked(saved[common_key(training)], "the round")
    if not common:  # of the dense steps of a warm-up
        return None
    own: Mapping[str, Named] = {}
    if int(saved["world_size"]) == group.size:
        key = own_key(training.placement, group)
        own = unpacked(saved[key]["round"], f"the round ({key})")
    found = SavedRound(**common, own=own)
    shapes = {slot.name: slot.local.shape for slot in training.placement.slots}
    whole = [found.shared, *([own["parameters"]] if own else [])]
    for held in (*whole, found.velocity, found.means, own.get("moved", {})):
        for name, value in held.items():
            if name not in shapes or value.shape != shapes[name]:
                raise ValueError(
                    f"the state's parameter {name} has shape {tuple(value.shape)}, the "
                    f"model's {tuple(shapes.get(name, ()))}: build the model that was "
                    "saved"
                )
    if any(held.keys() != shapes.keys() for held in whole):
        raise ValueError("the state's round is of another model's parameters")
    return found


def agree(training: Training, found: SavedRound | None) -> SavedRound | None:
    """Have all ranks go on from one round; a collective call, which changes nothing.

    Raises ValueError, on every rank, for states that do not say the same of what ranks
    agreed on last. A rank may have yet to apply what others have applied, if it skipped
    the step at which that was due: of these parameters nothing is compared. Nor has a
    rank noted a step that it skipped last, so that the others know where the round is.
    """
    if training.steps is None or not training.steps.rounds:
        return found
    own = None if found is None else (found.position, _settled(found))
    first, *others = told = training.engine.transport.gather_objects(own)
    for rank, other in enumerate(others, 1):
        where = "whether the run has come to rounds"
        if first is not None and other is not None:
            both = first[1].keys() & other[1].keys()
            odd = (name for name in sorted(both) if first[1][name] != other[1][name])
            where = next(odd, "")
        elif first is other:
            where = ""
        if where:
            raise ValueError(
                f"the state's {where} differs between ranks 0 and {rank}, which is "
                "alike after each exchange: these are states of different runs or "
                "moments; load what was saved at one moment, on every rank"
            )
    return found and replace(found, position=max(position for position, _ in told))


def _settled(found: SavedRound) -> dict[str, bytes]:
    """Digests of what all ranks have alike, unless it is under way on some."""
    kinds = {"shared": found.shared, "momentum of": found.velocity}
    return {
        f"{kind} {name}": digest(value)
        for kind, named in kinds.items()
        for name, value in named.items()
        if name not in found.means
    } | {f"mean of {name}": digest(mean) for name, mean in found.means.items()}


@torch.no_grad()
def load(training: Training, found: SavedRound | None) -> None:
    """Go on in the middle of a round; a collective call, with what was agreed on.

    With another number of ranks, a round begins with what the old ones agreed on last:
    what each of them has done alone since is lost.
    """
    steps, step = training.steps, training.step
    if steps is None:
        return
    if found is None or not steps.rounds:
        steps.on, step.position = False, 0
        return
    steps.on, training.buffers_due = True, not found.own or found.position == 0
    named = {slot.name: slot.param for slot in training.placement.slots}
    own = found.own or {"parameters": found.shared, "buffers": {}, "moved": {}}
    steps.shared = _like(named, found.shared)
    steps.velocity = _like(named, found.velocity)
    steps.moved = _like(named, own["moved"])
    steps.changed = {named[name] for name in own.get("changed", named)}
    for name, p in named.items():
        local(p).copy_(own["parameters"][name])
    for name, buffer in shared_buffers(training.model):
        if name in own["buffers"]:
            buffer.copy_(own["buffers"][name])
    step.position = found.position
    _hold(training, found.means)
    if not found.own:
        steps.closing = True
        step.settle()
        steps.closing, step.position = False, 0


def _like(named: Mapping[str, nn.Parameter], found: Named) -> dict[Tensor, Tensor]:
    """Tensors of the parameters' memory formats, with what was saved by name."""
    return {
        named[name]: torch.empty_like(local(named[name])).copy_(value)
        for name, value in found.items()
    }


def _hold(training: Training, means: Named) -> None:
    """Have buckets under way again, whose means have arrived."""
    for bucket in training.buckets:
        if bucket.slots[0].name not in means:
            continue
        bucket.move("launch")
        payload = bucket.payload
        mean = payload.flat if bucket.residual_empty else payload.mean_buffer()
        bucket.take(mean.zero_())
        for slot in bucket.slots:
            slot.of(mean).copy_(means[slot.name])


@contextmanager
def shared_parameters(training: Training) -> Iterator[None]:
    """Have the module compute with what the ranks agreed on last."""
    training.flush()
    steps = training.steps
    if steps is None or not (steps.on and steps.rounds):
        yield
        return
    params = [local(p) for p in steps.shared]
    own = [p.detach().clone() for p in params]
    with torch.no_grad():
        foreach_copy_(params, list(steps.shared.values()))
    try:
        yield
    finally:
        with torch.no_grad():
            foreach_copy_(params, own)
