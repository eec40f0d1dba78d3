"""What has to be saved so that a run goes on as if it had not been stopped.

Per rank: the undelivered remainders by parameter, and what each bucket's algorithm
remembers. Common to all: the order that the buckets follow. A rank's own entries are
under its own key, so that `torch.distributed.checkpoint`, which takes equal keys for
replicas, saves those of every rank.

Nothing is loaded that all ranks did not agree on: every rank reads its state (`read`),
all compare what must be common, and only then anything changes (`load`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from gradtide.agree import Signature
from gradtide.bucket import traits
from gradtide.gradients import GradientBucket, Slot
from gradtide.opaque import packed, unpacked
from gradtide.ops import Group
from gradtide.placement import Placement

StateDict = dict[str, Any]
DAMAGE = (
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
)
Algorithms = dict[str, dict[str, Tensor]]  # by the names of a bucket's parameters


@dataclass(frozen=True)
class Saved:
    """A state that this rank has read, and found to fit."""

    size: int
    scheme: str
    step: int | None  # None: of a version that did not count
    order: Sequence[str] | None
    remainders: dict[str, Tensor]  # that this rank takes over
    algorithms: Sequence[Algorithms]
    optimizer: dict[Any, Any] | None  # its state, where each rank has its own

    @property
    def common(self) -> Signature:
        """What has to be the same on all ranks."""
        order = "none" if self.order is None else sha256(repr(self.order).encode())
        return {
            "the state's world_size": self.size,
            "the state's step": self.step,
            "the state's scheme": self.scheme,
            "the state's order": order if isinstance(order, str) else order.hexdigest(),
        }


def save(
    placement: Placement, scheme: object, group: Group, step: int = 0
) -> StateDict:
    """This rank's state after so many steps; the tensors are copies."""
    order = [s.name for s in _slots(placement)] if placement.ordered else None
    return {
        "scheme": repr(scheme),
        "world_size": group.size,
        "step": step,
        "order": order,
        _key(group.rank): {
            "remainders": _remainders(placement),
            "algorithm": _algorithms(placement),
        },
    }


def blank(placement: Placement, group: Group, size: int) -> StateDict:
    """What this rank of `group` has to read of a checkpoint of `size` other ranks."""
    zeros = {n: torch.zeros_like(r) for n, r in _remainders(placement).items()}
    rank_states = {
        _key(rank): {"remainders": {n: zero.clone() for n, zero in zeros.items()}}
        for rank in _inherited(group, size)
    }
    return {"scheme": "", "world_size": size, "step": 0, "order": None, **rank_states}


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Raise ValueError for whatever comes of a state that is not whole."""
    try:
        yield
    except DAMAGE as error:
        raise ValueError(
            f"this is no whole state of gradtide's ({type(error).__name__}: {error}): "
            "load what sync.state_dict() returned, from a file that was written to its "
            "end"
        ) from error


def read(placement: Placement, group: Group, state: Mapping[str, Any]) -> Saved:
    """What this rank has to load of a state, whichever number of ranks saved it.

    Changes nothing. Raises ValueError for a state that does not fit, and what DAMAGE
    lists for one that is not whole.
    """
    size = int(state["world_size"])
    if size < 1:
        raise ValueError(f"the state has world_size={size}: 1 or more ranks saved one")
    inherited = range(group.rank, size, group.size)
    # Of the first that are missing: there may be as many as a number can say.
    few = inherited[: len(state) + 1]
    ranks = [group.rank] if size == group.size else list(few)
    missing = [_key(rank) for rank in ranks if _key(rank) not in state]
    if missing:
        raise ValueError(
            f"the state has no {missing[0]!r}: every rank saves its own, and with "
            f"{group.size} ranks now and {size} then, rank {group.rank} needs those of "
            f"{', '.join(map(_key, few[:9]))} in one dictionary"
        )
    own = state[_key(group.rank)] if size == group.size else {}
    found = Saved(
        size,
        str(state["scheme"]),
        None if state.get("step") is None else int(state["step"]),
        None if state["order"] is None else list(state["order"]),
        _sum([state[_key(rank)]["remainders"] for rank in ranks]),
        unpacked(own["algorithm"]) if own else (),
        unpacked(own["optimizer"]) if "optimizer" in own else None,
    )
    _check(placement, found)
    return found


def load(placement: Placement, scheme: object, group: Group, saved: Saved) -> None:
    """Go on from a state that all ranks have read and agreed on.

    With another number of ranks each takes over the remainders of some, so that their
    sum is kept, and the algorithms start anew; so they do under another scheme.
    """
    if saved.order is not None:
        placement.resume(saved.order)
    for home in placement.buckets:
        home.reset()
        for slot, view in zip(home.slots, home.views, strict=True):
            left = saved.remainders.get(slot.name)
            if left is not None:
                home.owe()  # on all ranks, whoever has something left
                view.copy_(left)
    if saved.size == group.size and saved.scheme == repr(scheme):
        for home in placement.buckets:
            host, there = (one.get(_names(home), {}) for one in saved.algorithms)
            device = home.load.flat.device
            home.load.state.update(host)
            home.load.state.update({k: v.to(device) for k, v in there.items()})


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
    return packed((host, device))


def _names(home: GradientBucket) -> str:
    """The bucket's parameters: what its algorithm remembers is about these."""
    return " ".join(slot.name for slot in home.slots)


def _sum(parts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, left in part.items():
            total[name] = total[name] + left if name in total else left
    return total


def _check(placement: Placement, saved: Saved) -> None:
    shapes = {slot.name: slot.param.shape for slot in _slots(placement)}
    if saved.order is not None and sorted(saved.order) != sorted(shapes):
        odd = sorted(set(saved.order) ^ set(shapes)) or sorted(saved.order)
        raise ValueError(
            f"the state's order is not one of this model's trainable parameters (see "
            f"{odd[0]!r}): build the model that was saved"
        )
    for name, left in saved.remainders.items():
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
        if not left.isfinite().all():
            raise ValueError(
                f"the state's remainder of {name} is not finite: load an earlier state"
            )
