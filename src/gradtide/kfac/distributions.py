"""The four distributions as rows: who sums, inverts and preconditions what, and when.

Pure: every rank comes to the same answers from the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from math import prod
from typing import TypeVar

import numpy as np

from gradtide.kfac import assign, invert
from gradtide.kfac.assign import Assignment, Send, earliest
from gradtide.kfac.config import KFAC
from gradtide.kfac.costs import Carried, Costs
from gradtide.kfac.layers import Layer, sequence

T = TypeVar("T")


def assignment(
    config: KFAC, layers: Sequence[Layer], size: int, known: Costs, carried: Carried
) -> Assignment:
    """Owners and workers for a configuration, and messages if `known.ready` is.

    Then owners for "pad" are by when factors are ready, too.
    """
    placed = _placed(config, layers, size, known)
    if not known.ready:
        return placed
    count = len(layers)
    ready = [*known.ready[:count], *reversed(known.ready[count:])]
    # Messages and runs are of neighbours in time, whatever the layers' order is.
    order = sorted(range(len(ready)), key=lambda i: (i >= count, ready[i], i))

    def at(values: Sequence[T]) -> list[T]:
        return [values[i] for i in order]

    def back(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(value for _, value in sorted(zip(order, values, strict=True)))

    times, sizes = at(ready), at([la.numel(kind) for la, kind in sequence(layers)])
    before = [0, *accumulate(sizes)]

    def reduce(owners: Sequence[int]) -> Send:
        """A sum of factors, in the order of time, for their owners."""
        parts = np.zeros((len(sizes) + 1, size))
        parts[np.arange(len(sizes)) + 1, owners] = sizes
        sums = parts.cumsum(0)
        return lambda begin, end: known.reduce(sums[end] - sums[begin], carried)

    def all_reduce(begin: int, end: int) -> float:
        """A sum for everybody is a sum for the owners of even parts, and a gather."""
        return 2 * known.send(before[end] - before[begin])

    start = known.start
    if config.distribution != "pad":
        cuts = earliest(times, all_reduce, 2 * start)
    elif share(config, layers, size, known) < 1:
        cuts = earliest(times, reduce(at(placed.owners)), start)
    else:
        seconds = at(_seconds(layers, known))
        found = assign.partitioned(seconds, sizes, size, times, reduce, start)
        owners, messages = back(found.owners), back(found.messages)
        return replace(found, owners=owners, messages=messages)
    return replace(placed, messages=back(assign.numbered(cuts)))


def _placed(
    config: KFAC, layers: Sequence[Layer], size: int, known: Costs
) -> Assignment:
    """By the costs of inversions and of their results alone."""
    seconds, workers = _seconds(layers, known), share(config, layers, size, known)
    if config.distribution == "dp" or workers < 1:
        return assign.grid(seconds, size, workers)
    if config.distribution == "mpd":
        return assign.round_robin(len(layers), size)
    if config.distribution == "spd":
        numels = [invert.numel(la, kind, config.form) for la, kind in sequence(layers)]
        return assign.balanced(seconds, numels, size, known.send)
    return assign.divided(seconds, size)


def _seconds(layers: Sequence[Layer], known: Costs) -> list[float]:
    """Of the inversion of each factor in the sequence."""
    return [la.groups * known.inverses[la.dim(kind)] for la, kind in sequence(layers)]


def share(config: KFAC, layers: Sequence[Layer], size: int, known: Costs) -> float:
    """The share of ranks that are gradient workers of a layer; under "dp" its owner is.

    Where it is open: all if inverses, handed out every `inverse_every` steps, take less
    time than preconditioned gradients in every step, otherwise one. What lies between
    takes part of both, and is not quicker than the better of the two.
    """
    if config.distribution == "dp":
        return 1 / size
    if config.workers is not None:
        return config.workers
    if config.distribution != "pad":
        return 1.0
    inverses = sum(invert.numel(la, kind, config.form) for la, kind in sequence(layers))
    gradients = sum(prod(layer.gradient_shape) for layer in layers)
    every = known.send(inverses) / config.inverse_every
    return 1.0 if every <= known.send(gradients) else 1 / size


def servers(workers: range, size: int) -> list[int]:
    """By rank, the gradient worker that preconditions for it; workers serve themselves.

    The others are dealt out, so that each worker serves as many as the next.
    """
    turns = cycle(workers)
    return [rank if rank in workers else next(turns) for rank in range(size)]
