"""What has to be saved of a round, beside the optimizer's state.

Between exchanges every rank has parameters and buffers of its own. All ranks have in
common what they agreed on last, the outer optimizer's momentum, how far the round is,
and means that have arrived and are not applied yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtide.core.step import Stage
from gradtide.runtime.checkpoint import common_key, own_key, packed, unpacked
from gradtide.runtime.exchange import Surroundings
from gradtide.runtime.exchange.consensus import Consensus
from gradtide.runtime.layout.broadcast import digest
from gradtide.runtime.layout.parameters import shared_buffers
from gradtide.transport.shards import local

Named = dict[str, Tensor]


@dataclass(frozen=True)
class SavedRound:
    """Of a state that this rank has read; `own` is empty with other ranks than now."""

    position: int
    shared: Named
    velocity: Named
    means: Named  # that have arrived, and are not applied yet
    # Parameters, buffers, what was done to them, and to which; sums of weights.
    own: Mapping[str, Named]


def key_of(around: Surroundings) -> str:
    """Where the ranks have what they agree on."""
    return common_key(around.placement, around.engine.group, "round")


def save(
    around: Surroundings,
    consensus: Consensus,
    saved: dict[str, Any],
) -> None:
    """Add a round to a state of this rank's; nothing may leave or arrive meanwhile."""
    placement = around.placement
    rank, common = own_key(placement, around.engine.group), key_of(around)
    if not consensus.begun:  # keys into which a checkpoint can be read
        saved[common] = saved[rank]["round"] = packed({})
        return
    named = {slot.name: slot.param for slot in placement.slots}
    saved[common] = packed(
        {
            "position": around.step.position,
            "shared": consensus.by_name(consensus.shared),
            "velocity": consensus.by_name(consensus.velocity),
            "means": {
                slot.name: mean.clone()
                for bucket in placement.buckets
                if bucket.stage is Stage.SENT
                for slot, mean in zip(bucket.slots, bucket.gradients, strict=True)
            },
        }
    )
    own = {
        "parameters": {name: local(p).clone() for name, p in named.items()},
        "buffers": {name: b.clone() for name, b in shared_buffers(around.model)},
        "moved": consensus.by_name(consensus.moved),
        "weights": around.notices.weights.since(around.step.schedule.fragments),
        "changed": {
            n: torch.empty(0, dtype=torch.float32, device="cpu")
            for n, p in named.items()
            if p in consensus.changed
        },
    }
    saved[rank]["round"] = packed(own)


def read(
    around: Surroundings, consensus: Consensus, saved: Mapping[str, Any]
) -> SavedRound | None:
    """What a state says of a round; None if it says nothing. Changes nothing.

    Raises whatever comes of a state that is not whole.
    """
    group, placement = around.engine.group, around.placement
    if key_of(around) not in saved:
        return None
    common = unpacked(saved[key_of(around)], "the round")
    if not common:  # of the dense steps of a warm-up
        return None
    own: Mapping[str, Named] = {}
    if int(saved["world_size"]) == group.size and not saved.get("lost"):
        key = own_key(placement, group)
        own = unpacked(saved[key]["round"], f"the round ({key})")
    found = SavedRound(**common, own=own)
    whole = [found.shared, *([own["parameters"]] if own else [])]
    for held in (*whole, found.velocity, found.means, own.get("moved", {})):
        consensus.check(held)
    names = {slot.name for slot in placement.slots}
    if any(held.keys() != names for held in whole):
        raise ValueError("the state's round is of another model's parameters")
    return found


def check_alike(told: list[tuple[int, dict[str, bytes]] | None]) -> None:
    """Raise ValueError for states that do not say the same of what ranks agreed on.

    `told` is of every rank its position and its `digests`; None of one without a round.
    A rank may have yet to apply what others have applied, if it skipped the step at
    which that was due: of these parameters nothing is compared.
    """
    first, *others = told
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


def digests(found: SavedRound) -> dict[str, bytes]:
    """Digests of what all ranks have alike, unless it is under way on some."""
    kinds = {"shared": found.shared, "momentum of": found.velocity}
    return {
        f"{kind} {name}": digest(value)
        for kind, named in kinds.items()
        for name, value in named.items()
        if name not in found.means
    } | {f"mean of {name}": digest(mean) for name, mean in found.means.items()}


def load(around: Surroundings, consensus: Consensus, found: SavedRound) -> None:
    """Go on in the middle of a round.

    With another number of ranks, or without what some have saved, a round begins with
    what the old ones agreed on last: what each of them has done alone since is lost.
    """
    consensus.begun = True
    named = {slot.name: slot.param for slot in around.placement.slots}
    own = found.own or {"parameters": found.shared, "buffers": {}, "moved": {}}
    consensus.shared = consensus.of_names(found.shared)
    consensus.velocity = consensus.of_names(found.velocity)
    consensus.moved = consensus.of_names(own["moved"])
    for name, p in named.items():
        local(p).copy_(own["parameters"][name])
    for name, buffer in shared_buffers(around.model):
        if name in own["buffers"]:
            buffer.copy_(own["buffers"][name])
    around.step.position = found.position
    around.notices.weights.resume(own.get("weights", {}))
    _hold(around, found.means)
    consensus.changed = {named[name] for name in own.get("changed", named)}


def _hold(around: Surroundings, means: Named) -> None:
    """Have buckets under way again, whose means have arrived."""
    for bucket in around.placement.buckets:
        if bucket.slots[0].name not in means:
            continue
        bucket.move("launch")
        payload = bucket.payload
        mean = payload.flat if bucket.residual_empty else payload.mean_buffer()
        bucket.take(mean.zero_())
        for slot in bucket.slots:
            slot.of(mean).copy_(means[slot.name])
