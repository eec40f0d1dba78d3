"""How many more steps a recipe needs to the same loss: what is known before a trial.

Measured on three small language models of unlike kinds, with Adam or its kin, from up
to three seeds (benchmarks/prior.py, its record): each recipe's loss after 400 steps, as
a number of steps of dense training at the same learning rate. It is a prior: what a
model needs, a trial on that model says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradtide.core.payload import settled
from gradtide.scheme import Scheme, parse


@dataclass(frozen=True)
class Cost:
    """Shares of more steps: on the typical task, and in the best and the worst run.

    Without `tasks` it was not measured.
    """

    typical: float
    least: float
    most: float
    tasks: int = 0

    @property
    def words(self) -> str:
        """What is known of it."""
        if math.isinf(self.typical):
            return "it hardly had any of the exact one's losses in the race"
        typical, least, most = (f"{100 * x:.3g}" for x in self.shares)
        if not self.tasks:
            return (
                f"nobody knows how many more: {typical} % are assumed, at most {most}"
            )
        where = "in the race" if self.tasks == 1 else f"on {self.tasks} tasks"
        if math.isinf(self.most):
            return f"{typical} % more and up ({least} % at the least {where})"
        told = f"{typical} % more"
        if self.typical < 0:
            told = f"{typical[1:]} % fewer"
        return f"{told} ({least} to {most} % {where})"

    @property
    def shares(self) -> tuple[float, float, float]:
        return self.typical, self.least, self.most


NONE = Cost(0.0, 0.0, 0.0)
UNKNOWN = Cost(0.25, 0.0, 0.5)
INT8 = Cost(-0.001, -0.053, 0.02, 3)
E3M0 = Cost(0.011, -0.056, 0.092, 3)
EXDYNA = Cost(0.018, -0.051, 0.214, 3)
# Of digits and an autoencoder, against the better of SGD and AdamW, all of them tuned:
# steps to a loss (benchmarks/curvature_learning.py, its record).
KFAC = Cost(-0.6, -0.83, -0.27, 2)
# By recipes, of any warm-up; of rounds, with one or without. `dear` has the bits of
# `wfbp`.
PRIOR = {
    "wfbp(wire='int8')": INT8,
    "dear(wire='int8')": INT8,
    "wfbp(wire='e3m0')": E3M0,
    "dear(wire='e3m0')": E3M0,
    "topka2a(0.02, schedule='local')": Cost(-0.01, -0.055, -0.006, 3),
    "topka2a(0.02, schedule='local', wire='e3m0')": Cost(-0.044, -0.095, 0.036, 3),
    "exdyna(0.01, schedule='local')": EXDYNA,
    # Not measured: taken for what it is with values as they are.
    "exdyna(0.01, schedule='local', wire='e3m0')": EXDYNA,
    "oktopk(0.01, schedule='local')": Cost(0.11, 0.064, 0.16, 3),
    "diloco(every=10, warmup=160)": Cost(0.238, -0.144, 0.845, 3),
    "diloco(warmup=160)": Cost(0.255, -0.051, 0.583, 3),
    # Most runs ended above all that dense training was measured at.
    "diloco(every=10)": Cost(1.417, 0.62, math.inf, 3),
    "diloco": Cost(1.495, 0.738, math.inf, 3),
    "sparseloco(every=10, warmup=160)": Cost(0.602, 0.231, 0.726, 3),
}


def cost_of(scheme: Scheme) -> Cost:
    """What a scheme that is not exact costs in steps."""
    if scheme.preconditioner is not None:
        return KFAC
    return find(PRIOR, scheme) or UNKNOWN


def find(known: Mapping[str, Cost], scheme: Scheme) -> Cost | None:
    """What is known of a scheme, by recipes; whatever its warm-up and its fusion."""
    own = _bare(scheme)
    return next((c for name, c in known.items() if _bare(parse(name)) == own), None)


def _bare(scheme: Scheme) -> tuple[Scheme, bool]:
    """What is looked for, and whether it is of rounds that begin without a warm-up."""
    inner: Any = settled(scheme.collective)
    cold = scheme.schedule.rounds and inner is scheme.collective
    return replace(scheme, collective=inner, fusion=Scheme().fusion), cold
