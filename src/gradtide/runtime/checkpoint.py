"""What has to be saved so that a run goes on as if it had not been stopped.

Each rank saves its residuals by parameter, and what each bucket's algorithm remembers;
common to all is the order that the buckets follow. A rank's own entries are under its
own key, so that `torch.distributed.checkpoint`, which takes equal keys for replicas,
saves those of every rank.

[Note: parts] The ranks that have the parts of one sharded model are one here: the
residual of a parameter is sharded as the parameter is, under a key that they have in
common, so that it can be read into other parts. What algorithms and optimizers remember
is of a part as a whole, and has the part's number in its key.

[Note: digests] Whatever was damaged since is found before anything changes. An opaque
piece begins with a checksum of its bytes. The one that every rank has, what algorithms
remember, also says what else there is: a checksum of each residual, which is the same
wherever a tensor lives and however it was saved, the names of the other pieces, and
what is not a tensor. A state of a version that wrote none of this is loaded as it is.
Ranks with other parts than saved it cannot compare those of residuals.

Nothing is loaded that all ranks did not agree on: every rank reads its state (`read`),
all compare what must be common, and only then anything changes (`load`).
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol, TypeAlias
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.core.ops import Group
from gradtide.core.payload import traits
from gradtide.runtime.guards.checksum import checksum
from gradtide.runtime.guards.validation import Signature
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.placement import Placement, Seen
from gradtide.transport.shards import like, local

StateDict: TypeAlias = dict[str, Any]
Algorithms = dict[str, dict[str, Tensor]]  # by the names of a bucket's parameters
SEAL = struct.Struct("<8sI")  # what a piece begins with: MARK, and a sum of the rest
MARK, UNSEALED = b"gradtide", b"PK"  # the other one is of earlier versions
PLAIN = "scheme", "world_size", "shards", "step", "untrained", "tuning"
COPY = "copy the file again, or load an earlier state"


class Saved(Protocol):
    """A part of what is saved of a run, by who owns it."""

    def save(self, saved: StateDict) -> None:
        """Add it to this rank's state. Local."""

    def blank(self, saved: StateDict) -> None:
        """Add keys into which that of another number of ranks can be read. Local."""

    def read(self, saved: Mapping[str, Any]) -> Any:
        """Return what this rank has to load. Local, and changes nothing.

        Raises ValueError for what does not fit, and whatever comes of what is damaged.
        """

    def confirm(self, found: Any) -> Any:
        """Return what all ranks load, of what each has read; collective.

        Raises ValueError, on every rank; changes nothing.
        """

    def load(self, found: Any) -> None:
        """Go on from it; collective."""


@dataclass(frozen=True)
class RunState:
    """What this rank has read of residuals and algorithms, and found to fit."""

    size: int
    parts: int
    scheme: str
    step: int | None  # None: of a version that did not count
    order: Sequence[str] | None
    residuals: dict[str, Tensor]  # that this rank takes over
    untrained: Sequence[str]  # by any rank, in the last exchange
    algorithms: Sequence[Algorithms]
    seen: Seen | None
    granted: bool  # all ranks sent norms
    wished: bool  # this rank was asked for one
    unit: float | None  # of weights, if ranks gave any

    @property
    def common(self) -> Signature:
        """What has to be the same on all ranks."""
        order = None if self.order is None else repr(self.order).encode()
        recorded = self.seen and self.seen.recorded
        told = "all" if recorded is None else "one" if recorded else "none"
        return {
            "the state's world_size": self.size,
            "the state's shards": self.parts,
            "the state's step": self.step,
            "the state's scheme": self.scheme,
            "the state's order": "none" if order is None else sha256(order).hexdigest(),
            # What travels, and when, depends on these.
            "the state's norms": self.granted,
            "the state's unit of weights": repr(self.unit),
            "what the state saw of steps": "nothing" if self.seen is None else told,
        }


def save(placement: Placement, scheme: object, group: Group, step: int) -> StateDict:
    """This rank's state after so many steps; the tensors are copies.

    When all pieces are there it is to be sealed.
    """
    ready = sorted(placement.slots, key=lambda slot: slot.position)
    states = {_names(bucket): bucket.memory() for bucket in placement.buckets}
    # Thresholds and counters live on the host: reading them waits for no device.
    host, device = (
        {
            names: {k: v for k, v in state.items() if (v.device.type == "cpu") == here}
            for names, state in states.items()
        }
        for here in (True, False)
    )
    saved: StateDict = {
        "scheme": repr(scheme),
        "world_size": group.size,
        "shards": placement.shards.number[1],
        "step": step,
        "order": [slot.name for slot in ready] if placement.ordered else None,
        "untrained": [slot.name for slot in placement.slots if not slot.used],
        f"rank{group.rank}": {"remainders": _residuals(placement)},
    }
    own = saved.setdefault(own_key(placement, group), {})
    own["algorithm"] = host, device
    return saved


def seal(
    saved: StateDict, placement: Placement, group: Group, notes: Mapping[str, Any]
) -> None:
    """Note what a state holds, see [Note: digests], and what there is to say of it."""
    own = saved[own_key(placement, group)]
    contents = {
        "plain": {key: saved[key] for key in PLAIN if key in saved},
        "pieces": sorted(key for key in own if isinstance(own[key], bytes)),
        "remainders": _digests(saved[f"rank{group.rank}"]["remainders"]),
        "notes": dict(notes),
    }
    # As a text: that of equal contents is equal, what pickle makes of them need not be.
    own["algorithm"] = packed((*own["algorithm"], json.dumps(contents)))


def own_key(placement: Placement, group: Group) -> str:
    """Where this rank, and no other, has what it remembers; see [Note: parts]."""
    number, count = placement.shards.number
    return f"rank{group.rank}" + f".part{number}" * (count > 1)


def common_key(placement: Placement, group: Group, name: str) -> str:
    """Where ranks have what they agree on; of shards, those with the same part."""
    return own_key(placement, group).replace(f"rank{group.rank}", name)


def blank(placement: Placement, group: Group, size: int, parts: int) -> StateDict:
    """What this rank of `group` has to read of a checkpoint of `size` other ranks.

    Each of them had one of so many parts.
    """
    own = _residuals(placement)
    ranks: dict[str, StateDict] = {
        f"rank{rank}": {"remainders": {n: torch.zeros_like(r) for n, r in own.items()}}
        for rank in range(group.rank, size, group.size)
    }
    if parts == placement.shards.number[1]:
        for rank in range(group.rank, size, group.size):
            key = own_key(placement, Group(rank, size))
            ranks.setdefault(key, {})["algorithm"] = b""
    common = {"scheme": "", "world_size": size, "shards": parts, "step": 0}
    return {**common, "order": None, "untrained": [], **ranks}


def read(placement: Placement, group: Group, state: Mapping[str, Any]) -> RunState:
    """What this rank has to load of a state, whichever number of ranks saved it.

    Changes nothing. Raises ValueError for a state that does not fit, and whatever comes
    of one that is not whole.
    """
    size = int(state["world_size"])
    if size < 1:
        raise ValueError(f"the state has world_size={size}: 1 or more ranks saved one")
    # Of the first that are missing: there may be as many as a number can say.
    few = [*range(group.rank, size, group.size)[: len(state) + 1]]
    lost = {*state.get("lost", ())}  # ranks whose own states are nowhere
    few = [rank for rank in few if rank not in lost]
    keys = [f"rank{rank}" for rank in few]
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(
            f"the state has no {missing[0]!r}: every rank saves its own, and with "
            f"{group.size} ranks now and {size} then, rank {group.rank} needs those of "
            f"{', '.join(keys[:9])} in one dictionary"
        )
    parts = int(state.get("shards", 1))
    alike = (size, parts) == (group.size, placement.shards.number[1]) and not lost
    own = state[own_key(placement, group)] if alike else {}
    sums: dict[str, Tensor] = {}
    for key in keys:
        for name, residual in state[key]["remainders"].items():
            sums[name] = sums[name] + residual if name in sums else residual
    told = [
        _remembered(state.get(own_key(placement, Group(rank, size)), {}), rank)
        for rank in few
    ]
    memories, contents = told[0] if own else ((), {})
    for name in ("algorithm", *contents.get("pieces", ())):
        if own and not own.get(name):
            raise ValueError(f"the state has no {name!r} of rank {group.rank}: {COPY}")
    notes = contents.get("notes", {})
    seen = Seen(*notes["seen"]) if notes else None
    found = RunState(
        size,
        parts,
        str(state["scheme"]),
        None if state.get("step") is None else int(state["step"]),
        None if state["order"] is None else list(state["order"]),
        sums,
        list(state.get("untrained", ())),
        memories,
        seen if seen is not None and placement.fits(seen) else None,
        bool(notes.get("granted")),
        bool(notes.get("wished")),
        None if notes.get("unit") is None else float(notes["unit"]),
    )
    _check(placement, found)
    for key, (_, written) in zip(keys, told, strict=True):
        _compare(key, state, written)
    return found


def _remembered(
    own: Mapping[str, Any], rank: int
) -> tuple[Sequence[Algorithms], Mapping[str, Any]]:
    """What a rank's algorithms remembered on the host, and on devices.

    With it comes what the rank wrote of its state's contents, see [Note: digests]. An
    earlier version wrote nothing, and there is nothing of a rank that had other parts.
    """
    piece = own.get("algorithm")
    if piece is None:
        return (), {}
    found = unpacked(piece, f"what algorithms remember (rank {rank})")
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise TypeError("what algorithms remember is no pair")
    host, device, *contents = found
    for memory in (*host.values(), *device.values()):
        odd = [key for key, value in memory.items() if not isinstance(value, Tensor)]
        if odd:
            raise TypeError(f"{odd[0]} is no tensor")
    return (host, device), json.loads(contents[0]) if contents else {}


def _compare(rank: str, state: Mapping[str, Any], contents: Mapping[str, Any]) -> None:
    """Raise ValueError for what is not as a rank has saved it, see [Note: digests]."""
    plain, sums = contents.get("plain", {}), contents.get("remainders", {})
    changed = [name for name in plain if state.get(name, plain[name]) != plain[name]]
    found = _digests(state[rank]["remainders"]) if contents else {}
    for name in {**sums, **found}:
        if sums.get(name) != found.get(name):
            changed.append(f"residual of {name} ({rank})")
    if changed:
        raise ValueError(f"the state's {changed[0]} is not what was saved: {COPY}")


def _digests(named: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of what this rank has of each tensor; waits for the device once."""
    if not named:
        return {}
    sums = [checksum([local(tensor)]) for tensor in named.values()]
    told = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
    return dict(zip(named, told, strict=True))


def load(placement: Placement, scheme: object, saved: RunState) -> None:
    """Go on from a state that all ranks have read and agreed on.

    With another number of ranks each takes over the residuals of some, so that their
    sum is kept, and the algorithms start anew; so they do under another scheme, with
    another number of parts, and where some ranks' own states are lost.
    """
    placement.resume(saved.order, saved.seen)
    resized = not saved.algorithms
    for bucket in placement.buckets:
        found = [saved.residuals.get(slot.name) for slot in bucket.slots]
        # With more ranks than before some have none to take over.
        bucket.restart([r if r is None else local(r) for r in found], zero=resized)
    if not resized and saved.scheme == repr(scheme):
        for bucket in placement.buckets:
            host, there = (one.get(_names(bucket), {}) for one in saved.algorithms)
            device = bucket.payload.flat.device
            bucket.payload.state.update(host)
            bucket.payload.state.update({k: v.to(device) for k, v in there.items()})
    for bucket in placement.buckets:
        for slot in bucket.slots:
            if slot.name in saved.untrained:  # as when it was saved, it waits
                slot.used = False
                bucket.set_aside(slot)


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer's state, where every rank has its own."""

    optimizer: Optimizer
    placement: Placement
    engine: Engine

    def save(self, saved: StateDict) -> None:
        own = packed(self.optimizer.state_dict()["state"])
        saved[own_key(self.placement, self.engine.group)]["optimizer"] = own

    def blank(self, saved: StateDict) -> None: ...

    def read(self, saved: Mapping[str, Any]) -> dict[Any, Any] | None:
        group, parts = self.engine.group, self.placement.shards.number[1]
        alike = int(saved["world_size"]), int(saved.get("shards", 1))
        whole = alike == (group.size, parts) and not saved.get("lost")
        own = saved[own_key(self.placement, group)] if whole else {}
        if "optimizer" not in own:
            return None
        found: dict[Any, Any] = unpacked(own["optimizer"], "the optimizer")
        known = isinstance(found, dict)
        known = known and all(isinstance(one, dict) for one in found.values())
        # Parameters have numbers; another piece may be one of dictionaries, too.
        if not known or (found and not any(type(key) is int for key in found)):
            raise ValueError(f"the state's 'optimizer' is no optimizer's: {COPY}")
        return found

    def confirm(self, found: dict[Any, Any] | None) -> dict[Any, Any] | None:
        return found

    def load(self, found: dict[Any, Any] | None) -> None:
        if found is not None:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": found, "param_groups": groups})


def packed(value: object) -> bytes:
    """Nested containers of tensors, numbers and texts as one opaque piece.

    A checkpoint is read into the keys that are there, and those of some states are not
    known before a first step. It is sealed, see [Note: digests].
    """
    buffer = io.BytesIO(bytes(SEAL.size))
    buffer.seek(SEAL.size)
    torch.save(value, buffer)
    with buffer.getbuffer() as held:
        SEAL.pack_into(held, 0, MARK, crc32(held[SEAL.size :]))
    return buffer.getvalue()


def unpacked(piece: bytes, name: str) -> Any:
    """What was `packed`, on the CPU.

    Raises RuntimeError, with the piece's `name`, for what is not whole.
    """
    if not piece.startswith(UNSEALED):
        mark, total = SEAL.unpack_from(piece.ljust(SEAL.size, b"\0"))
        piece = piece[SEAL.size :]
        if mark != MARK or total != crc32(piece):
            raise RuntimeError(f"the piece of {name} is not what was saved: {COPY}")
    try:
        return torch.load(io.BytesIO(piece), weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds, for many kinds of damage
        raise RuntimeError(f"the piece of {name} cannot be read: {error}") from error


def _residuals(placement: Placement) -> dict[str, Tensor]:
    """Copies of the residuals by parameter; none where there never is one."""
    return {
        slot.name: like(slot.param, bucket.residual_of(slot))
        for bucket in placement.buckets
        # A dense exchange owes what a sparse one left to it, until it has run.
        if traits(bucket.collective).residual
        or bucket.waiting
        or not bucket.residual_empty
        for slot in bucket.slots
    }


def _names(bucket: GradientBucket) -> str:
    """The bucket's parameters: what its algorithm remembers is about these."""
    return " ".join(slot.name for slot in bucket.slots)


def _check(placement: Placement, saved: RunState) -> None:
    shapes = {slot.name: slot.local.shape for slot in placement.slots}
    if saved.order is not None and sorted(saved.order) != sorted(shapes):
        odd = sorted(set(saved.order) ^ set(shapes)) or sorted(saved.order)
        raise ValueError(
            f"the state's order is not one of this model's trainable parameters (see "
            f"{odd[0]!r}): build the model that was saved"
        )
    for name, residual in saved.residuals.items():
        if name not in shapes:
            raise ValueError(
                f"the state holds what was left of {name}, which this model does not "
                "have or does not train: build the model that was saved"
            )
        own = local(residual)
        if own.shape != shapes[name]:
            raise ValueError(
                f"the state's residual of {name} has shape {tuple(own.shape)}, the "
                f"parameter {tuple(shapes[name])}: build the model that was saved, and "
                "read it with torch.distributed.checkpoint if it is sharded otherwise"
            )
        if not own.isfinite().all():
            raise ValueError(
                f"the state's residual of {name} is not finite: load an earlier state"
            )
