"""What has to be saved so that a run goes on as if it had not been stopped.

Per rank: the undelivered remainders by parameter, and what each bucket's algorithm
remembers. Common to all: the order that the buckets follow. A rank's own entries are
under its own key, so that `torch.distributed.checkpoint`, which takes equal keys for
replicas, saves those of every rank.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradtide.bucket import traits
from gradtide.gradients import GradientBucket, Slot
from gradtide.ops import Group
from gradtide.placement import Placement

StateDict = dict[str, Any]


def save(placement: Placement, scheme: object, group: Group) -> StateDict:
    """This rank's state; the tensors are copies."""
    order = [s.name for s in _slots(placement)] if placement.ordered else None
    return {
        "scheme": repr(scheme),
        "world_size": group.size,
        "order": order,
        _key(group.rank): {
            "remainders": _remainders(placement),
            "algorithm": _algorithms(placement),
        },
    }


def blank(placement: Placement, scheme: object, group: Group, size: int) -> StateDict:
    """What this rank of `group` has to read of a checkpoint of `size` ranks."""
    if size == group.size:
        return save(placement, scheme, group)
    zeros = {n: torch.zeros_like(r) for n, r in _remainders(placement).items()}
    rank_states = {
        _key(rank): {"remainders": {n: zero.clone() for n, zero in zeros.items()}}
        for rank in _inherited(group, size)
    }
    return {"scheme": "", "world_size": size, "order": None, **rank_states}


def load(
    placement: Placement, scheme: object, group: Group, state: Mapping[str, Any]
) -> None:
    """Go on from `state`, which was saved by as many ranks or by any other number.

    With another number of ranks each takes over the remainders of some, so that their
    sum is kept, and the algorithms start anew; so they do under another scheme. Raises
    ValueError, before anything is changed, for a state that does not fit.
    """
    size = int(state["world_size"])
    ranks = [group.rank] if size == group.size else _inherited(group, size)
    missing = [_key(rank) for rank in ranks if _key(rank) not in state]
    if missing:
        raise ValueError(
            f"the state has no {missing[0]!r}: every rank saves its own, and with "
            f"{group.size} ranks now and {size} then, rank {group.rank} needs those of "
            f"{', '.join(map(_key, ranks))} in one dictionary"
        )
    remainders = _sum([state[_key(rank)]["remainders"] for rank in ranks])
    _check(placement, remainders)
    if state["order"] is not None:
        placement.resume(state["order"])
    for home in placement.buckets:
        home.reset()
        for slot, view in zip(home.slots, home.views, strict=True):
            left = remainders.get(slot.name)
            if left is not None:
                home.owe()  # on all ranks, whoever has something left
                view.copy_(left)
    if size == group.size and state["scheme"] == repr(scheme):
        _restore(placement, state[_key(group.rank)]["algorithm"])


def _key(rank: int) -> str:
    return f"rank{rank}"


def _inherited(group: Group, size: int) -> list[int]:
    """The ranks of `size` whose remainders this rank takes over."""
    return list(range(group.rank, size, group.size))


def _slots(placement: Placement) -> list[Slot]:
    slots = [slot for home in placement.buckets for slot in home.slots]
    return sorted(slots, key=lambda slot: slot.position)


def _remainders(placement: Placement) -> dict[str, Tensor]:
    """What was left behind, by parameter; nothing where nothing ever is."""
    return {
        slot.name: torch.zeros_like(view) if home.clean else view.clone()
        for home in placement.buckets
        # A dense exchange owes what a sparse one left to it, until it has run.
        if not (home.clean and traits(home.collective).dense)
        for slot, view in zip(home.slots, home.views, strict=True)
    }


def _algorithms(placement: Placement) -> bytes:
    """The buckets' states in one opaque piece.

    Its keys are not known before a first step, and a checkpoint is read into the keys
    that are there.
    """
    states = {_names(home): home.load.state for home in placement.buckets}
    # Thresholds and counters live on the host: reading them waits for no device.
    host, device = (
        {
            names: {k: v for k, v in state.items() if (v.device.type == "cpu") == here}
            for names, state in states.items()
        }
        for here in (True, False)
    )
    buffer = io.BytesIO()
    torch.save((host, device), buffer)
    return buffer.getvalue()


def _restore(placement: Placement, algorithms: bytes) -> None:
    host, device = torch.load(
        io.BytesIO(algorithms), weights_only=True, map_location="cpu"
    )
    for home in placement.buckets:
        load = home.load
        load.state.update(host.get(_names(home), {}))
        for key, value in device.get(_names(home), {}).items():
            load.state[key] = value.to(load.flat.device)


def _names(home: GradientBucket) -> str:
    """The bucket's parameters: what its algorithm remembers is about these."""
    return " ".join(slot.name for slot in home.slots)


def _sum(parts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, left in part.items():
            total[name] = total[name] + left if name in total else left
    return total


def _check(placement: Placement, remainders: Mapping[str, Tensor]) -> None:
    shapes = {slot.name: slot.param.shape for slot in _slots(placement)}
    for name, left in remainders.items():
        if name not in shapes:
            raise ValueError(
                f"the state holds what was left of {name}, which this model does not "
                "have or does not train: build the model that was saved"
            )
        if left.shape != shapes[name]:
            raise ValueError(
                f"the state's remainder of {name} has shape {tuple(left.shape)}, the "
                f"parameter {tuple(shapes[name])}: build the model that was saved"
            )
