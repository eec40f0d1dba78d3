"""How many more steps a recipe needs to the same loss: what is known before a trial.

Measured on three small language models of unlike kinds, with Adam or its kin, from up
to three seeds (benchmarks/prior.py, its record): each recipe's loss after 400 steps, as
a number of steps of dense training at the same learning rate. It is a prior: what a
model needs, a trial on that model says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradtide.core.payload import settled, wire_of
from gradtide.scheme import Scheme


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
        typical, least, most = (f"{100 * x:.2g}" for x in self.shares)
        if not self.tasks:
            return (
                f"nobody knows how many more: {typical} % are assumed, at most {most}"
            )
        where = "in the race" if self.tasks == 1 else f"on {self.tasks} tasks"
        told = f"{typical} % more"
        if self.typical < 0:
            told = f"{typical[1:]} % fewer"
        return f"{told} ({least} to {most} % {where})"

    @property
    def shares(self) -> tuple[float, float, float]:
        return self.typical, self.least, self.most


NONE = Cost(0.0, 0.0, 0.0)
UNKNOWN = Cost(0.25, 0.0, 0.5)
# Of what is rounded on the wire and made up for, by the wire; of steps that are
# exchanged sparsely, by the collective, on tasks with Adam or its kin.
WIRES = {"int8": Cost(-0.001, -0.053, 0.02, 3), "e3m0": Cost(0.011, -0.056, 0.092, 3)}
STEPS = {
    "TopKA2A": Cost(-0.044, -0.095, 0.036, 3),
    "PartitionedTopK": Cost(0.018, -0.051, 0.214, 3),
    "OkTopk": Cost(0.11, 0.064, 0.16, 3),
}


def cost_of(scheme: Scheme) -> Cost:
    """What a scheme that is not exact costs in steps."""
    inner = settled(scheme.collective)
    if scheme.schedule.rounds or scheme.outer is not None:
        return UNKNOWN
    if scheme.schedule.launch == "step":
        return STEPS.get(type(inner).__name__, UNKNOWN)
    return WIRES.get(str(wire_of(inner) or ""), UNKNOWN)
