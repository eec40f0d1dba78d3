"""What a collective asks for: found out by running it, on fewer numbers.

The real flow runs for some steps on random gradients, and its requests are noted. What
was noted is the script of a bucket: the virtual engine plays it, at the size of the
real bucket, whenever the bucket is launched.

[Note: Sizes] A flow whose requests depend on shapes alone runs on tensors without
memory, at full size. Others select from numbers. They run at some sizes, each twice the
one before, and the totals of every request lie on a straight line through the two
nearest: counts stay, entries grow. The largest size leaves every rank some entries for
every other, so that no rounding to whole entries or to messages' alignment matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from gradtide.bucket import Collective, settled, traits
from gradtide.ops import Group, Op
from gradtide.plan.flows import LOCKSTEP, Noted, Shapes, by_numbers, by_shapes
from gradtide.plan.labour import Work
from gradtide.plan.sketch import between, built

ENTRIES = 128  # that a rank has for every other, where a script is continued
FEWEST = 8
FIRST = 64  # elements for every rank up to which a bucket is rehearsed as it is
LONGEST = 1 << 15  # of a rank's part: indices in it take 16 bits, also if it is uneven
MOST = 1 << 21  # elements of all flows together, as far as FEWEST allows


class Act(NamedTuple):
    """A stretch of a flow: work, and then what is asked for (empty: the cut)."""

    work: Work
    asked: tuple[Op, ...]
    several: bool  # were asked for together


class Script(NamedTuple):
    """One exchange of a bucket."""

    acts: tuple[Act, ...]
    work: Work  # after the last answer
    selector: str


def scripts(
    collective: Collective, numel: int, dtype: torch.dtype, shapes: Shapes, size: int
) -> Sequence[Script]:
    """The exchanges of a bucket of `numel` elements in the first two or three steps.

    `shapes` are those of its parts, for collectives that work on matrices. Raises
    ValueError where a collective cannot be run without its peers.
    """
    inner = settled(collective)
    if traits(inner).depends_on != "shapes":
        shapes = ()
    return _scripts(inner, numel, dtype, shapes, size)


def script_of(played: Sequence[Script], step: int) -> Script:
    """That of any step: after the first, the others in turn."""
    return played[0 if step == 0 else 1 + (step - 1) % (len(played) - 1)]


@lru_cache(maxsize=4096)
def _scripts(
    collective: Any, numel: int, dtype: torch.dtype, shapes: Shapes, size: int
) -> Sequence[Script]:
    own, group = traits(collective), Group(0, size)
    if own.depends_on == "shapes":
        noted = by_shapes(collective, numel, dtype, shapes, size)
        return tuple(_script(n, 0.0, "", group) for n in noted)
    if own.depends_on == "length":
        one, two = (by_shapes(collective, n, dtype, (), size) for n in (size, 2 * size))
        straight = _between(one[-1], two[-1], numel / size - 2, numel / (2 * size))
        return (_script(straight, 0.0, "", group),) * 2
    low, high = _rungs(collective, numel, size)
    noted = by_numbers(collective, high, dtype, size)
    if low < high:
        before = by_numbers(collective, low, dtype, size)
        weight = (numel - high) / (high - low)
        noted = [
            _between(a, b, weight, numel / high)
            for a, b in zip(before, noted, strict=True)
        ]
    scanned = float(numel)
    selector = type(getattr(collective, "select", None)).__name__
    if own.searches_part:
        selector = "Threshold"
        # Its own selection scans a part, but sorts what is as small as a rehearsal.
        scanned = numel / size
        noted = [_without_sorting(n) for n in noted]
    return tuple(_script(n, scanned, selector, group) for n in noted)


def _between(one: Noted, two: Noted, weight: float, ratio: float) -> Noted:
    """`sketch.between`; work grows by `ratio`.

    Not in a straight line: messages of more than one block of indices bring more work
    than shorter ones, and a line through both would bring it again and again.
    """
    requests = between(
        [asked for _, asked in one.asked],
        [asked for _, asked in two.asked],
        weight,
        ratio,
    )
    works = [work.times(ratio) for work, _ in two.asked]
    asked = list(zip(works, requests, strict=True))
    return Noted(asked, two.work.times(ratio))


def _without_sorting(noted: Noted) -> Noted:
    asked = [(work._replace(ordered=0.0), requests) for work, requests in noted.asked]
    return Noted(asked, noted.work)


def _rungs(collective: Any, numel: int, size: int) -> tuple[int, int]:
    """The two sizes from which the script for `numel` is made; or `numel` itself."""
    first = FIRST * size
    if numel <= first:
        return numel, numel
    density = float(getattr(collective, "density", 0.01))
    room = MOST // min(size, LOCKSTEP)
    entries = max(FEWEST, min(ENTRIES, int(room * density / size)))
    small = 3 * traits(collective).small / (density * 4)
    rung, most = first, max(min(entries / density, LONGEST) * size, small)
    while rung < min(numel, most):
        rung *= 2
    return rung // 2, rung


def _script(noted: Noted, scanned: float, selector: str, group: Group) -> Script:
    """Requests of the real size, with the work around them."""
    sparse = any(
        request.kind != "Cut" and request.dtype == torch.uint8
        for _, asked in noted.asked
        for request in asked
    )
    selecting = scanned if sparse and selector else 0.0
    acts: list[Act] = []
    for work, asked in noted.asked:
        work, selecting = work._replace(scanned=selecting), 0.0
        cut = asked[0].kind == "Cut"
        ops = () if cut else tuple(built(request, group) for request in asked)
        acts.append(Act(work, ops, len(asked) > 1))
    return Script(tuple(acts), noted.work, selector)
