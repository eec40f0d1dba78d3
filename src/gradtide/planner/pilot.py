"""How many more steps each scheme needed in a race of the user's own.

[Note: In steps] A race's record (`gradtide race`) has the losses of each contestant by
its steps. In the second half of the steps that both made, the exact one's loss falls
with the logarithm of its steps; the slope says how many steps a difference in loss is
worth. The mean of the differences is the typical cost. Its range is two standard
deviations each way: those of the differences, and SEED, by which the cost of a recipe
differs from one seed to the next (benchmarks/records/learning_gpt_202611.json: .03
among three seeds of eight recipes). Where the loss hardly falls, steps say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradtide.planner.data.document import read_json
from gradtide.planner.prior import Cost
from gradtide.planner.search import kind
from gradtide.scheme import parse

Course: TypeAlias = Sequence[tuple[float, float]]  # steps and losses
DDP = "ddp"  # as a race calls torch's, which is exact
SEED = 0.04  # standard deviation of the logarithm of a cost
LEAST = 4  # looks in a second half
CLEAR = 3.0  # standard errors that a slope has to be above 0
MOST = math.log(10)  # of a logarithm: more counts as never


def read(path: Path) -> dict[str, Cost]:
    """What a race's record says of its contestants that are not exact, by their names.

    Raises ValueError where it is no record, has no exact contestant, or tells nothing.
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
    exact = next((name for name in courses if is_exact(name)), None)
    if exact is None:
        raise ValueError(
            f"{path}: no exact contestant to compare with: race ddp or wfbp with the "
            "others"
        )
    # Those of torch's own that are not exact, with a hook, are no schemes.
    others = {n: c for n, c in courses.items() if not (is_exact(n) or _is_ddp(n))}
    costs = {name: cost(courses[exact], course) for name, course in others.items()}
    told = {name: each for name, each in costs.items() if each is not None}
    if others and not told:
        raise ValueError(
            f"{path}: in the second half of the race the loss of {exact} hardly fell, "
            f"or was looked at less than {LEAST} times: race for longer"
        )
    return told


def cost(exact: Course, other: Course) -> Cost | None:
    """How many more steps `other` needed; None: that is not to be told.

    See [Note: In steps].
    """
    if not exact or not other:
        return None
    first, there = np.array(exact, float), np.array(other, float)
    begin, end = there[0, 0], min(first[-1, 0], there[-1, 0])
    late = first[(first[:, 0] >= max(end / 2, begin)) & (first[:, 0] <= end)]
    fitted = _falls(late) if len(late) >= LEAST else None
    if fitted is None or not fitted.clear:
        return None
    above = np.interp(late[:, 0], there[:, 0], there[:, 1]) - late[:, 1]
    typical = above.mean() / fitted.slope
    own = above.std(ddof=1) / math.sqrt(len(above)) / fitted.slope
    either = 2 * math.hypot(own, SEED)
    least, most = _share(typical - either), _share(typical + either)
    return Cost(_share(typical), least, most, tasks=1)


class Fall(NamedTuple):
    """By how much a loss falls for each e-fold of steps, and how surely."""

    slope: float
    error: float

    @property
    def clear(self) -> bool:
        return self.slope > max(CLEAR * self.error, 0.0)


def _falls(late: np.ndarray[Any, Any]) -> Fall:
    """Least squares of the losses over the logarithm of the steps."""
    x, y = np.log(late[:, 0]), late[:, 1]
    x -= x.mean()
    square = float(x @ x)
    slope = float(x @ y) / square
    rest = y - y.mean() - slope * x
    error = math.sqrt(float(rest @ rest) / (len(x) - 2) / square)
    return Fall(-slope, error)


def _share(logarithm: float) -> float:
    return math.inf if logarithm > MOST else math.exp(logarithm) - 1


def _is_ddp(name: str) -> bool:
    return name.startswith(DDP)


def is_exact(name: str) -> bool:
    """Whether a contestant's means are exact, so that others are held against it."""
    return name == DDP if _is_ddp(name) else kind(parse(name)) == "lossless"
