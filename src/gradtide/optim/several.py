"""Several optimizers of one model as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Several(Optimizer):
    """Optimizers that share a model's parameters out, to be stepped as one.

    `DistributedMuon` for matrices and AdamW for the rest, say, where one optimizer is
    asked for: by `gradtide.replicate` under `dear`, by schedulers, by frameworks. Its
    groups are theirs, in their order; a step steps each in turn.

    Args:
        *optimizers: Two or more optimizers that have no parameter in common.

    Raises:
        ValueError: There are fewer than two, or two have a parameter in common.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if len(optimizers) < 2:
            raise ValueError("Several(...): pass two optimizers or more")
        groups = [group for each in optimizers for group in each.param_groups]
        params = [p for group in groups for p in group["params"]]
        if len({*map(id, params)}) < len(params):
            raise ValueError(
                "Several(...): two of the optimizers step the same parameter: give "
                "each the parameters that are its own"
            )
        super().__init__(params, {})
        self.optimizers = list(optimizers)
        self.param_groups = groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer in turn.

        Args:
            closure: It is called first, with gradients enabled, if it is given.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def consolidate_state_dict(self) -> None:
        """Gather what ranks have of the state of each that divides it; collective."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "consolidate_state_dict"):
                optimizer.consolidate_state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, in their order.

        Returns:
            Their states, as the list `"optimizers"`.
        """
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned.

        Args:
            state_dict: The states of as many optimizers, in the same order.

        Raises:
            ValueError: It is of another number of optimizers, or of none.
        """
        found = state_dict.get("optimizers", ())
        if len(found) != len(self.optimizers):
            raise ValueError(
                f"the state is of {len(found)} optimizers, and these are "
                f"{len(self.optimizers)}: build those that were saved"
            )
        for each, state in zip(self.optimizers, found, strict=True):
            each.load_state_dict(state)
        self.param_groups = [g for each in self.optimizers for g in each.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to one of those inside: by its own method, then build this anew.

        Args:
            param_group: The group, while this is built.

        Raises:
            RuntimeError: It is built already.
        """
        if hasattr(self, "optimizers"):
            raise RuntimeError(
                "Several: add the group to one of the optimizers inside, and build "
                "Several anew"
            )
        super().add_param_group(param_group)
