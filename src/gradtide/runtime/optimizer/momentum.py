"""The optimizer's momentum, handed over to what selects gradients.

[Note: momentum] The gradients of a residual arrive late and all at once. Momentum
that is computed from what arrives then pushes for many more steps in a direction that
is old already. `MomentumCorrection` computes it before selection, from each rank's own
gradients (Lin et al., ICLR 2018, 3.1); the optimizer must then have none. Here it is
taken from the optimizer for the steps in which that is so, and given back after each.
"""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer


class Momentum:
    """The momentum of an optimizer, while a scheme may take it over.

    Raises ValueError for an optimizer whose momentum is not known.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.now()

    def now(self) -> tuple[float, float]:
        """The factors a and b of u = a u + b g, from which the optimizer would step.

        They are read in every step, because schedulers change them. Raises ValueError
        where groups of parameters differ in them.
        """
        self.give_back()
        found = {_factors(self._optimizer, g) for g in self._optimizer.param_groups}
        if len(found) > 1:
            raise ValueError(
                "the optimizer's groups differ in momentum, which momentum_correction "
                "uses as one: give all the same, or leave momentum_correction out"
            )
        return found.pop()

    def take(self) -> None:
        """Take the momentum from the optimizer, until `give_back`."""
        self.give_back()
        for group in self._optimizer.param_groups:
            changes = without(group)
            self._taken.append((group, {key: group[key] for key in changes}))
            group.update(changes)

    def give_back(self) -> None:
        """Undo `take`; also after a step that raised, when the next one begins."""
        for group, own in self._taken:
            group.update(own)
        self._taken = []


def without(group: dict[str, Any]) -> dict[str, Any]:
    """What to change in a group of parameters, for an optimizer without momentum."""
    if "betas" in group:
        return {"betas": (0.0, *group["betas"][1:])}
    return {"momentum": 0.0, "nesterov": False}


def _factors(optimizer: Optimizer, group: dict[str, Any]) -> tuple[float, float]:
    if isinstance(optimizer, Adam | AdamW):
        factor = float(group["betas"][0])
        return factor, 1.0 - factor
    if isinstance(optimizer, SGD):
        factor = float(group["momentum"])
        return factor, 1.0 - float(group["dampening"]) if factor else 1.0
    raise ValueError(
        "momentum_correction uses the momentum of SGD, Adam and AdamW, not that of "
        f"{type(optimizer).__name__}: leave it out, or use one of these"
    )
