"""Nothing decided yet: the stand-in for what a plan will choose."""

from __future__ import annotations

from dataclasses import dataclass

from gradtide.bucket import Payload, Traits
from gradtide.collectives.dense import Dense
from gradtide.ops import Flow, Group

FEWEST = 4  # steps: two until buckets follow the real order, two to take times


@dataclass(frozen=True)
class Auto(Traits):
    """Dense, until `gradtide.auto` has profiled `steps` steps and planned.

    It then chooses among exact means and such that are rounded on the wire; with
    `lossy` also among methods that deliver part of the gradient later, if these are
    faster even where they need the share `margin` more steps, with `warmup` steps at
    higher densities, and `corrected` with the optimizer's momentum. Without `deferred`
    parameters change at `step()` only.
    """

    lossy: bool = False
    deferred: bool = True
    steps: int = 12  # more: steadier times, a later decision
    margin: float = 0.25
    warmup: int = 0
    corrected: bool = False

    undecided = True

    def __post_init__(self) -> None:
        if self.steps < FEWEST:
            raise ValueError(f"{self}: profile at least {FEWEST} steps")
        if not self.margin >= 0:
            raise ValueError(f"{self}: margin is a share of steps, 0 or more")
        for name in ("warmup", "corrected"):
            if getattr(self, name) and not self.lossy:
                raise ValueError(f"{self}: {name} is for lossy schemes: add lossy=True")

    @property
    def takes_momentum(self) -> bool:
        return self.corrected

    def reduce(self, load: Payload, group: Group) -> Flow:
        return Dense().reduce(load, group)
