"""Dense at first, then sparser in steps: a wrapper for any collective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradtide.bucket import Collective, Payload, Traits, count, layers
from gradtide.collectives.corrected import takes_over
from gradtide.collectives.dense import Dense
from gradtide.ops import Flow, Group


@dataclass(frozen=True)
class Warmup(Traits):
    """`collective` with other densities for the first steps (Lin et al., ICLR 2018).

    Each of `densities` holds for `steps` steps, then the collective's own does. 1 means
    a dense exchange, which delivers what had been left behind as well. The densities of
    Deep Gradient Compression are (0.25, 0.0625, 0.016, 0.004), an epoch each.

    Around `Corrected` it sets the density of what is inside; in dense steps momentum
    that is the optimizer's stays there. A collective that has no density can be
    preceded by dense steps only.
    """

    collective: Collective
    steps: int = 100
    densities: tuple[float, ...] = (1.0,)

    transparent = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"Warmup(steps={self.steps}): at least 1 for each density")
        for density in self.densities:
            if not 0 < density <= 1:
                raise ValueError(
                    f"Warmup(densities={self.densities}): above 0 and at most 1"
                )
            _check_density(self.collective, density)

    def reduce(self, load: Payload, group: Group) -> Flow:
        density = self._density(count(_own(load.state)))
        collective = self.collective
        if density is not None:
            collective = _with_density(collective, density)
        return (yield from collective.reduce(load, group))

    def dense_next(self, state: dict[str, Tensor]) -> bool:
        return self._density(_done(state)) == 1

    def dense_last(self, state: dict[str, Tensor]) -> bool:
        return _done(state) > 0 and self._density(_done(state) - 1) == 1

    def _density(self, step: int) -> float | None:
        """Of the exchange with this number; None: the collective's own."""
        stage = step // self.steps
        return self.densities[stage] if stage < len(self.densities) else None


def _own(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state with a step number of its own: what is inside may count, too."""
    zero = torch.zeros((), dtype=torch.int64)
    return {"step": state.setdefault("warmup.step", zero)}


def _done(state: dict[str, Tensor]) -> int:
    """The number of exchanges so far."""
    return int(_own(state)["step"])


def _with_density(collective: Any, density: float) -> Collective:
    if hasattr(collective, "collective"):
        inner = _with_density(collective.collective, density)
        if density == 1 and takes_over(collective):
            return inner
        return replace(collective, collective=inner)  # type: ignore[no-any-return]
    if density == 1:
        return Dense(getattr(collective, "wire", None))
    return replace(collective, density=density)  # type: ignore[no-any-return]


def _check_density(collective: Any, density: float) -> None:
    """Raise ValueError where `_with_density` could not."""
    *_, inner = layers(collective)
    if density != 1 and not hasattr(inner, "density"):
        raise ValueError(
            f"Warmup({inner!r}): it has no density to begin with; use "
            "densities=(1.0,) for dense steps"
        )
