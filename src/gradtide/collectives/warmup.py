"""Dense at first, then sparser in steps: a wrapper for any collective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradtide.collectives.dense import Dense
from gradtide.collectives.momentum_correction import (
    forget,
    uses_optimizer_momentum,
)
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import (
    Collective,
    Payload,
    Traits,
    density_of,
    inner,
    layers,
    next_step,
    traits,
    wire_of,
)

STEP = "warmup.step"


@dataclass(frozen=True)
class Warmup:
    """Use other densities of a collective for the first steps, such as dense ones.

    This is the warm-up of Deep Gradient Compression (Lin et al., ICLR 2018), whose
    densities are 0.25, 0.0625, 0.016 and 0.004, for an epoch each. At the beginning of
    a training gradients change fast, and what arrives late is wrong.

    Cost and residual: those of the collective with the density of the step. A dense
    step sends what `Dense` sends, and delivers the residual as well. The last of them
    rounds nothing that would be kept: what comes next may exchange something else, such
    as steps, and finds no residual.

    Around `MomentumCorrection` it sets the density of what that wraps; in dense steps
    the optimizer keeps its momentum.

    Args:
        collective: What holds after the warm-up, and, with other densities, during it.
            One that has no density can be preceded by dense steps only.
        steps: How many steps each of `densities` holds, 1 or more. The default, 100, is
            a starting point for short trainings: more is safer, and sends more.
        densities: The densities, in turn, each above 0 and at most 1, where 1 stands
            for a dense step. The default is dense steps only, because every collective
            can have them.

    Raises:
        ValueError: A field is outside its range, or the collective has no density to
            change.
    """

    collective: Collective
    steps: int = 100
    densities: tuple[float, ...] = (1.0,)

    traits = Traits(transparent=True)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"Warmup(steps={self.steps}): at least 1 for each density")
        *_, last = layers(self.collective)
        for density in self.densities:
            if not 0 < density <= 1:
                raise ValueError(
                    f"Warmup(densities={self.densities}): above 0 and at most 1"
                )
            if density != 1 and density_of(last) is None:
                raise ValueError(
                    f"Warmup({last!r}): it has no density to begin with; use "
                    "densities=(1.0,) for dense steps"
                )

    def reduce(self, payload: Payload, group: Group) -> Flow:
        # A number of its own: what is inside may count, too.
        step = next_step(payload.state, STEP)
        density, collective = self._density(step), self.collective
        if density is not None:
            collective = _with_density(collective, density)
        if density == 1 and uses_optimizer_momentum(self.collective):
            forget(payload.state)  # what was exchanged densely it has not seen
        if density == 1 != self._density(step + 1) and traits(collective).residual:
            collective = Dense()
        return (yield from collective.reduce(payload, group))

    def stages(self) -> list[Collective]:
        """What it does at each of its densities, `steps` steps each."""
        return [_with_density(self.collective, each) for each in self.densities]

    def dense_next(self, state: dict[str, Tensor]) -> bool:
        return self._density(_done(state)) == 1

    def dense_last(self, state: dict[str, Tensor]) -> bool:
        return _done(state) > 0 and self._density(_done(state) - 1) == 1

    def _density(self, step: int) -> float | None:
        """Of the exchange with this number; None: the collective's own."""
        stage = step // self.steps
        return self.densities[stage] if stage < len(self.densities) else None


def _done(state: dict[str, Tensor]) -> int:
    """The number of exchanges so far."""
    return int(state.get(STEP, 0))


def _with_density(collective: Any, density: float) -> Collective:
    wrapped = inner(collective)
    if wrapped is not None:
        changed = _with_density(wrapped, density)
        if density == 1 and uses_optimizer_momentum(collective):
            return changed
        return replace(collective, collective=changed)  # type: ignore[no-any-return]
    if density == 1:
        return Dense(wire_of(collective))
    return replace(collective, density=density)  # type: ignore[no-any-return]
