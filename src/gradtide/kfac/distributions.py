"""The four distributions as rows: who sums, inverts and preconditions what, and when.

Pure: every rank comes to the same answers from the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import numpy as np

from gradtide.kfac import assign, invert
from gradtide.kfac.assign import Assignment
from gradtide.kfac.config import KFAC
from gradtide.kfac.costs import Carried, Costs
from gradtide.kfac.layers import KINDS, Layer
from gradtide.kfac.partition import Send, earliest

T = TypeVar("T")


def assignment(
    config: KFAC, layers: Sequence[Layer], size: int, known: Costs, carried: Carried
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

    def reduce(owners: Sequence[int]) -> Send:
        return _reduce(known, sizes, owners, size, carried)

    if config.distribution == "pad" and share(config, layers, size, known) == 1:
        seconds = _at(_seconds(layers, known), order)
        found = assign.partitioned(seconds, sizes, size, times, reduce, known.start)
        owners = _back(found.owners, order)
        return replace(found, owners=owners, messages=_back(found.messages, order))
    placed = _placed(config, layers, size, known)
    if config.distribution == "pad":
        cuts = earliest(times, reduce(_at(placed.owners, order)), known.start)
    else:
        cuts = earliest(times, _all_reduce(known, sizes), 2 * known.start)
    return replace(placed, messages=_back(assign.numbered(cuts), order))


def _reduce(
    known: Costs,
    sizes: Sequence[int],
    owners: Sequence[int],
    size: int,
    carried: Carried,
) -> Send:
    """A sum of factors, in the order of time, for their owners."""
    parts = np.zeros((len(sizes) + 1, size))
    parts[np.arange(len(sizes)) + 1, owners] = sizes
    before = parts.cumsum(0)
    return lambda begin, end: known.reduce(before[end] - before[begin], carried)


def _all_reduce(known: Costs, sizes: Sequence[int]) -> Send:
    """A sum for everybody is a sum for the owners of even parts, and a gather."""
    before = [0, *accumulate(sizes)]
    return lambda begin, end: 2 * known.send(before[end] - before[begin])


def _placed(
    config: KFAC, layers: Sequence[Layer], size: int, known: Costs
) -> Assignment:
    """By the costs of inversions and of their results alone."""
    seconds = _seconds(layers, known)
    if config.distribution == "dp":
        return assign.whole_layers(seconds, size)
    if (workers := share(config, layers, size, known)) < 1:
        return assign.grid(seconds, size, workers)
    numels = [
        invert.numel(layers[i], kind, config.form)
        for i, kind in assign.sequence(len(layers))
    ]
    if config.distribution == "mpd":
        return assign.round_robin(len(layers), size)
    if config.distribution == "spd":
        return assign.balanced(seconds, numels, size, known.send)
    return assign.partitioned(seconds, numels, size)


def share(config: KFAC, layers: Sequence[Layer], size: int, known: Costs) -> float:
    """The share of ranks that are gradient workers of a layer.

    Where it is open: all if inverses, handed out every `inverse_every` steps, take less
    time than preconditioned gradients in every step, otherwise one. What lies between
    takes part of both, and is not quicker than the better of the two.
    """
    if config.workers is not None:
        return config.workers
    if config.distribution != "pad":
        return 1.0
    inverses = sum(
        invert.numel(layer, kind, config.form) for layer in layers for kind in KINDS
    )
    gradients = sum(layer.gradient_numel for layer in layers)
    every = known.send(inverses) / config.inverse_every
    return 1.0 if every <= known.send(gradients) else 1 / size


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
