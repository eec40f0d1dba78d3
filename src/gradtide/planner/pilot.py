"""How many more steps each scheme needed in a race of the user's own.

[Note: In steps] A race's record (`gradtide race`) has the losses of each contestant by
its steps. Of those that the exact one first had in the second half of its steps, each
is looked for in the other's course: it was there so many steps later, or earlier. The
median of these shares is typical; the least and the most are their range. A loss that
the other never had counts as infinitely many steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from gradtide.core.payload import settled
from gradtide.planner.data.document import read_json
from gradtide.planner.prior import Cost
from gradtide.planner.search import kind
from gradtide.scheme import Scheme, parse

Course: TypeAlias = Sequence[tuple[float, float]]  # steps and losses
DDP = "ddp"  # as a race calls torch's, which is exact


def read(path: Path) -> dict[str, Cost]:
    """What a race's record says of its contestants that are not exact, by their names.

    Raises ValueError where it is no record, or has no exact contestant.
    """
    found = read_json(path, "record of a race")
    try:
        courses = {
            row["scheme"]: [
                (float(steps), float(loss))
                for steps, loss in zip(
                    row["course"]["steps"], row["course"]["loss"], strict=True
                )
            ]
            for row in found["results"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no record of a race ({error!r}): make one by `gradtide race "
            "--rate none`, whose record.json is meant"
        ) from None
    courses = {name: course for name, course in courses.items() if len(course) > 1}
    exact = next((name for name in courses if _is_exact(name)), None)
    if exact is None:
        raise ValueError(
            f"{path}: no exact contestant to compare with: race ddp or wfbp with the "
            "others"
        )
    # Those of torch's own that are not exact, with a hook, are no schemes.
    others = {n: c for n, c in courses.items() if not (_is_exact(n) or _is_ddp(n))}
    return {name: cost(courses[exact], course) for name, course in others.items()}


def cost(exact: Course, other: Course) -> Cost:
    """How many more steps `other` needed, see [Note: In steps]."""
    half = exact[-1][0] / 2
    first, there = falling(exact), falling(other)
    late = [(at, loss) for at, loss in first if at >= half]
    shares = [arrival(there, loss) / at - 1 for at, loss in dict(late).items()]
    return Cost(median(shares), min(shares), max(shares), tasks=1)


def falling(course: Course) -> Course:
    """With the lowest loss up to each look."""
    lowest = accumulate((loss for _, loss in course), min)
    return [(at, loss) for (at, _), loss in zip(course, lowest, strict=True)]


def arrival(course: Course, loss: float) -> float:
    """After how many steps a falling course first has a loss; infinity: never."""
    if course[0][1] <= loss:
        return course[0][0]
    for (early, above), (late, below) in pairwise(course):
        if below <= loss:
            return early + (late - early) * (above - loss) / (above - below)
    return math.inf


def find(known: Mapping[str, Cost], scheme: Scheme) -> Cost | None:
    """What is known of a scheme, whatever its warm-up."""
    same = (c for name, c in known.items() if _bare(parse(name)) == _bare(scheme))
    return next(same, None)


def _bare(scheme: Scheme) -> Scheme:
    """Without its warm-up, and without what a fusion may be tuned to."""
    inner: Any = settled(scheme.collective)
    return replace(scheme, collective=inner, fusion=parse("wfbp").fusion)


def _is_ddp(name: str) -> bool:
    return name.startswith(DDP)


def _is_exact(name: str) -> bool:
    return name == DDP if _is_ddp(name) else kind(parse(name)) == "lossless"
