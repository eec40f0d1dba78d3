"""Who has the winners: owners add up what arrived and rank the sums together."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtide.collectives._balance import Curve, curve_ranks, shares
from gradtide.collectives._entries import Entries, Steps, tell
from gradtide.core.devices import on_device
from gradtide.core.ops import Group, ToHost
from gradtide.selectors.kernels import entries

SKEW = 2  # times the average that a region may receive before regions are cut anew
SLACK = 1.0  # powers of 2 that the threshold may fall unnoticed in one step
LARGEST = 1025.0  # level (log2) of infinities and NaNs: above all finite numbers
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def rank_sums(
    sums: Entries,
    received: int,
    k: int,
    fresh: bool,
    state: dict[str, Tensor],
    group: Group,
) -> Steps:
    """The number of winners of every owner, and which of `sums` they are here.

    Remembers in `state` the level that was reached, and whether regions were uneven.
    """
    known = None if fresh else state.get("level")
    looked_at, magnitudes = _candidates(sums[1], known, -(-k // group.size))
    # The bits of magnitudes rank like the magnitudes, NaNs above infinity; and integers
    # are sorted ten times as fast.
    ranked, order = magnitudes.view(_BITS[magnitudes.itemsize]).sort()
    levels = _sample(ranked.view(magnitudes.dtype))
    head = on_device([len(looked_at), received], levels.dtype, levels.device)
    told = yield from tell(torch.cat([head, levels]), group)
    told = yield ToHost(told)
    rows = told.tolist()
    curves = [
        Curve([-level for level in levels if n], curve_ranks(int(n)) if n else [])
        for n, _, *levels in rows
    ]
    numbers, level = shares(curves, k)
    state["level"] = torch.tensor(level, dtype=torch.float64, device="cpu")
    shared = [row[1] for row in rows]
    state["skewed"] = torch.tensor(
        max(shared) * group.size > SKEW * sum(shared), dtype=torch.bool, device="cpu"
    )
    mine = order[len(order) - numbers[group.rank] :]
    return numbers, looked_at.index_select(0, mine).sort().values


def _candidates(values: Tensor, known: Tensor | None, least: int) -> Entries:
    """Where to look for winners: near the last level if there are enough, never at 0.

    Places in `values` and the magnitudes there. The choice concerns this rank alone:
    what it tells is about what it looked at.
    """
    floor = 0.0 if known is None else float((known - SLACK).exp2())
    found, there = entries(values, floor, len(values))
    if known is not None and len(found) < least:
        found, there = entries(values, 0.0, len(values))
    return found, there.abs()


def _sample(ranked: Tensor) -> Tensor:
    """Levels (log2, float64) of ascending magnitudes at their `curve_ranks`."""
    count = len(ranked)
    places = [count - rank for rank in curve_ranks(count)]
    if not count:
        return ranked.new_zeros(len(places), dtype=torch.float64)
    at = on_device(places, torch.int64, ranked.device)
    levels = ranked.index_select(0, at).double().log2()
    return levels.nan_to_num(LARGEST, LARGEST)
