"""The four distributions as rows: who sums, inverts and preconditions what, and when.

Pure: every rank comes to the same answers from the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradtide.kfac import assign
from gradtide.kfac.assign import Assignment
from gradtide.kfac.config import KFAC
from gradtide.kfac.layers import Layer


def assignment(
    config: KFAC,
    layers: Sequence[Layer],
    size: int,
    inverse: Callable[[int], float],
    send: Callable[[int], float],
) -> Assignment:
    """Owners and workers for a configuration.

    `inverse` maps the rows of a factor to the seconds of its inversion, `send` a number
    of elements to those of gathering them from their owners.
    """
    factors = [(layers[i], kind) for i, kind in assign.sequence(len(layers))]
    costs = [layer.groups * inverse(layer.dim(kind)) for layer, kind in factors]
    numels = [layer.numel(kind) for layer, kind in factors]
    if config.distribution == "dp":
        return assign.whole_layers(costs, size)
    if config.workers < 1:
        return assign.grid(costs, size, config.workers)
    if config.distribution == "mpd":
        return assign.round_robin(len(layers), size)
    if config.distribution == "spd":
        return assign.balanced(costs, numels, size, send)
    return assign.partitioned(costs, numels, size)


def servers(workers: range, size: int) -> list[int]:
    """By rank, the gradient worker that preconditions for it; workers serve themselves.

    The others are dealt out, so that each worker serves as many as the next.
    """
    others = [rank for rank in range(size) if rank not in workers]
    served = {rank: workers[i % len(workers)] for i, rank in enumerate(others)}
    return [served.get(rank, rank) for rank in range(size)]
