"""Nothing decided yet: what stands where a plan will put a collective."""

from __future__ import annotations

from dataclasses import dataclass

FEWEST = 4  # steps: two until buckets follow the real order, two to take times


@dataclass(frozen=True)
class Auto:
    """Stand for what a plan will choose; average exactly until then.

    The first `steps` steps are profiled. Then gradtide predicts schemes on its virtual
    clock, and all ranks go on with the best. It chooses among schemes with exact means
    and such that are rounded on the wire. Where steps come to take longer or shorter
    for long, it measures the network and decides anew. It cannot be wrapped, takes the
    schedule WFBP, and cannot be combined with K-FAC.

    It is no collective, and stands in the place of one.

    Cost and residual: those of `Dense` until then, afterwards those of what was chosen.

    Args:
        lossy: Whether schemes may be chosen that deliver a part later, or exchange
            steps. The default is False, because they change what is learned.
        deferred: Whether schedules that update in the next forward (DEAR) may be
            chosen. False suits a loop that reads gradients between backward and step.
        steps: How many steps to profile, 4 or more. The first two settle the order of
            buckets. The default, 12, takes ten for the times: more are steadier, and
            decide later.
        margin: What share of additional steps a lossy scheme has to be able to afford
            before it is chosen, 0 or more. None, the default, asks for as many as it
            needed in the worst of the runs that are known (docs/plan.md).
        warmup: How many steps at higher densities a sparse scheme begins with; needs
            `lossy`. The default, 0, leaves as many as the recipe has that is chosen.
        momentum_correction: Whether a sparse scheme computes the optimizer's momentum
            before selection, see `MomentumCorrection`; needs `lossy`.

    Raises:
        ValueError: A field is outside its range, or `warmup` or `momentum_correction`
            is given without `lossy`.
    """

    lossy: bool = False
    deferred: bool = True
    steps: int = 12  # more: steadier times, a later decision
    margin: float | None = None
    warmup: int = 0
    momentum_correction: bool = False

    def __post_init__(self) -> None:
        if self.steps < FEWEST:
            raise ValueError(f"{self}: profile at least {FEWEST} steps")
        if self.margin is not None and not self.margin >= 0:
            raise ValueError(f"{self}: margin is a share of steps, 0 or more")
        for name in ("warmup", "momentum_correction"):
            if getattr(self, name) and not self.lossy:
                raise ValueError(f"{self}: {name} is for lossy schemes: add lossy=True")
