"""What every rank saves beside a framework's own checkpoint.

Frameworks write one checkpoint, on rank 0. A residual is each rank's own, and as large
as the model: to collect those of all ranks would send them over the network that is the
slow one. So every rank writes a file of its own into a folder beside the checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import Any, TypeAlias

from gradtide.checkpoint import files
from gradtide.checkpoint.files import Folder
from gradtide.core.payload import traits
from gradtide.replica import Replica
from gradtide.runtime.guards.validation import Signature, check_ranks_agree

FOLDER = "gradtide"  # inside a checkpoint that is a folder itself
State: TypeAlias = dict[str, Any]


def save(state: State, rank: int, folder: str) -> None:
    """Write a rank's state into a folder. Local.

    A file that is there already stays whole until the new one is written to its end.
    """
    Folder(folder).write(_name(rank), state, {"rank": rank})


def load(replica: Replica, folder: str, step: int | None = None) -> None:
    """Go on from what all ranks have saved in a folder. This is a collective call.

    A checkpoint without the folder is one of plain training: residuals begin at zero.
    Ranks of another number than then share the files of all among themselves. Raises
    ValueError, on every rank and before anything changes, for a file that is missing,
    damaged, or not of the `step` that is known.
    """
    group = replica.engine.transport.group

    def prepare() -> tuple[State, Signature]:
        state = _read(folder, group.rank, group.size)
        if state and step is not None and state.get("step") != step:
            raise ValueError(
                f"the checkpoint is of step {step}, but {folder} of step "
                f"{state.get('step')}, as after a crash while saving: resume from an "
                "earlier one, or remove the folder, and residuals begin at zero"
            )
        return state, {folder: "there" if state else "not there"}

    remedy = "copy the folder, with the files of all ranks, to every host"
    state = check_ranks_agree(replica.engine.transport, prepare, remedy)
    if state:
        replica.load_state_dict(state)
    elif group.rank == 0 and traits(replica.scheme.collective).residual:
        warnings.warn(f"{folder} is not there: residuals begin at zero", stacklevel=2)


def save_all(replicas: Sequence[Replica], folder: str) -> list[int]:
    """Write this rank's states, where one checkpoint is of several models.

    This is a collective call. Returns the steps that each replica has taken.
    """
    for replica in replicas:
        replica.gather_gradients()  # of a backward without a step
    found = [replica.state_dict() for replica in replicas]
    for replica, state, own in zip(replicas, found, _numbered(folder), strict=False):
        save(state, replica.engine.transport.group.rank, own)
    return [state["step"] for state in found]


def load_all(
    replicas: Sequence[Replica], folder: str, steps: Iterable[int] | None = None
) -> None:
    """Go on from what was written by `save_all`. This is a collective call."""
    known = repeat(None) if steps is None else steps
    for replica, own, step in zip(replicas, _numbered(folder), known, strict=False):
        load(replica, own, step)


def _numbered(folder: str) -> Iterator[str]:
    """Folders of models, named as Accelerate names their weights."""
    return (f"{folder}_{i}" if i else folder for i in count())


def remove(rank: int, folder: str) -> None:
    """Remove a rank's file, and with the last one the folder. Local."""
    own = Folder(folder)
    own.remove(_name(rank))
    own.remove_empty()


def _name(rank: int) -> str:
    return f"rank{rank}.pt"


def _read(folder: str, rank: int, size: int) -> State:
    """What this one of `size` ranks has to load; empty if nothing is there."""
    state = _file(folder, rank) or _file(folder, 0)  # there may have been fewer ranks
    before = int(state.get("world_size", size))
    if before != size:
        for other in range(rank, before, size):
            state = {**state, **_file(folder, other)}
    return state


def _file(folder: str, rank: int) -> State:
    own = Folder(folder)
    if not own.exists(_name(rank)):
        return {}
    data = own.read(_name(rank))
    try:
        # An earlier version said nothing behind the state.
        state: State = (
            files.unpacked(data, "it")[1]
            if files.is_sealed(data)
            else (files.loaded(data))
        )
    except ValueError as error:
        raise ValueError(
            f"{own.path(_name(rank))} cannot be read ({error}): resume from an earlier "
            "checkpoint"
        ) from error
    return state
