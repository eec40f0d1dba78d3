"""Optimizers whose state each rank has of its own, where they are used anew.

Under schemes that exchange steps every rank's optimizer learns from this rank's
gradients alone. Once such a replica is removed, another one may have the same optimizer
step by means of gradients: from states that differ, ranks would come apart. So who
removes one notes it, and where the optimizer is used next all ranks go on with rank 0's
state, as they do with its parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.runtime.checkpoint import packed, unpacked
from gradtide.runtime.layout.broadcast import broadcast

LOG = logging.getLogger("gradtide")
# On the optimizer itself, which outlives replicas; no copy or pickle of it has this.
NOTE = "_gradtide_own_state"


def note(optimizer: Optimizer) -> None:
    """Its state may differ between ranks from now on."""
    vars(optimizer)[NOTE] = True


def share(engine: Engine, optimizer: Optimizer) -> None:
    """Have all ranks go on with rank 0's state, if it was noted that theirs differ.

    Collective where it was, which is on all ranks or on none; nothing may be in flight.
    """
    if not vars(optimizer).pop(NOTE, False):
        return
    told = heard(engine, 0, optimizer.state_dict, "the optimizer's state")
    if engine.group.rank:
        optimizer.load_state_dict(dict(told))
    else:
        LOG.info(
            "the state of %s was each rank's own: all ranks go on with rank 0's",
            type(optimizer).__name__,
        )


def heard(
    engine: Engine, source: int, words: Callable[[], Mapping[str, Any]], name: str
) -> Mapping[str, Any]:
    """The words of rank `source`, heard by all, itself too; collective.

    Raises RuntimeError, with the `name`, on every rank if they cannot be sent or read.
    """
    piece, wrong = b"", ""
    if engine.group.rank == source:
        try:
            piece = packed(words())
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
    length, wrong = engine.transport.gather_objects((len(piece), wrong))[source]
    if wrong:
        raise RuntimeError(f"rank {source} cannot send {name} ({wrong})")
    # Of the source nothing is overwritten.
    data = torch.frombuffer(bytearray(piece or length), dtype=torch.uint8)
    broadcast(engine, [data], source)
    found: Mapping[str, Any] = unpacked(data.numpy().tobytes(), name)
    return found
