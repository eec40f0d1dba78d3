"""The four distributions as rows: who sums, inverts and preconditions what, and when.

Pure: every rank comes to the same answers from the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from gradtide.kfac import assign
from gradtide.kfac.assign import Assignment
from gradtide.kfac.config import KFAC
from gradtide.kfac.costs import Costs
from gradtide.kfac.layers import Layer
from gradtide.kfac.partition import earliest

T = TypeVar("T")


def assignment(
    config: KFAC, layers: Sequence[Layer], size: int, known: Costs
) -> Assignment:
    """Owners and workers for a configuration, and messages if `known.ready` is."""
    if not known.ready:
        return _placed(config, layers, size, known)
    sequence = assign.sequence(len(layers))
    ready = [known.ready[i + (k == "G") * len(layers)] for i, k in sequence]
    factors = [(layers[i], kind) for i, kind in sequence]
    numels = [layer.numel(kind) for layer, kind in factors]
    # Messages and runs are of neighbours in time, whatever the layers' order is.
    order = sorted(range(len(ready)), key=lambda i: (i >= len(layers), ready[i], i))
    times, sizes = _at(ready, order), _at(numels, order)

    if config.distribution == "pad" and config.workers == 1:
        seconds = _at(_seconds(layers, known), order)
        found = assign.partitioned(seconds, sizes, size, times, known.send)
        owners = _back(found.owners, order)
        return replace(found, owners=owners, messages=_back(found.messages, order))
    # A sum for everybody is a sum for the owners and a gather.
    turns = 1 if config.distribution == "pad" else 2
    cuts = earliest(sizes, times, lambda numel: turns * known.send(numel))
    placed = _placed(config, layers, size, known)
    return replace(placed, messages=_back(assign.numbered(cuts), order))


def _placed(
    config: KFAC, layers: Sequence[Layer], size: int, known: Costs
) -> Assignment:
    """By the costs of inversions and of their results alone."""
    seconds = _seconds(layers, known)
    numels = [layers[i].numel(kind) for i, kind in assign.sequence(len(layers))]
    if config.distribution == "dp":
        return assign.whole_layers(seconds, size)
    if config.workers < 1:
        return assign.grid(seconds, size, config.workers)
    if config.distribution == "mpd":
        return assign.round_robin(len(layers), size)
    if config.distribution == "spd":
        return assign.balanced(seconds, numels, size, known.send)
    return assign.partitioned(seconds, numels, size)


def _seconds(layers: Sequence[Layer], known: Costs) -> list[float]:
    """Of the inversion of each factor in the sequence."""
    return [
        layers[i].groups * known.inverse(layers[i].dim(kind))
        for i, kind in assign.sequence(len(layers))
    ]


def _at(values: Sequence[T], order: Sequence[int]) -> list[T]:
    return [values[i] for i in order]


def _back(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Undo `_at`."""
    found = dict(zip(order, values, strict=True))
    return tuple(found[i] for i in range(len(found)))


def servers(workers: range, size: int) -> list[int]:
    """By rank, the gradient worker that preconditions for it; workers serve themselves.

    The others are dealt out, so that each worker serves as many as the next.
    """
    others = [rank for rank in range(size) if rank not in workers]
    served = {rank: workers[i % len(workers)] for i, rank in enumerate(others)}
    return [served.get(rank, rank) for rank in range(size)]
