"""Several optimizers of one model as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Several(Optimizer):
    """Optimizers that share a model's parameters out, to be stepped as one.

    `DistributedMuon` for matrices and AdamW for the rest, say, where one optimizer is
    asked for: by `gradtide.replicate` under `dear` and in rounds, by schedulers, by
    frameworks. Its groups and its state are theirs, in their order; a step steps each
    in turn.

    Args:
        *optimizers: Two or more optimizers that have no parameter in common.

    Raises:
        ValueError: There are fewer than two, or two have a parameter in common.
    """

    steps_what_it_holds = True  # and nobody else does

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
        self.optimizers: Sequence[Optimizer] = ()
        super().__init__(params, {})
        self.optimizers = optimizers
        self.param_groups = groups

    @property
    def state(self) -> Any:
        """What each remembers of its parameters."""
        return _States(self.optimizers)

    @state.setter
    def state(self, state: object) -> None:
        """It has none of its own."""

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
        """Return the state of all, as `torch.optim.Optimizer` does.

        Returns:
            The state of every parameter, and the groups.

        Raises:
            RuntimeError: Other ranks have a part of it: see `consolidate_state_dict`.
        """
        for optimizer in self.optimizers:
            optimizer.state_dict()  # raises, of one that has a part alone
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of as many groups, in the same order.

        Args:
            state_dict: What `state_dict` has returned.

        Raises:
            ValueError: It has another number of groups, or one is of another length.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} groups, and these optimizers have "
                f"{len(self.param_groups)}: build those that were saved"
            )
        left = iter(groups)
        for optimizer in self.optimizers:
            own = list(islice(left, len(optimizer.param_groups)))
            before = [number for group in own for number in group["params"]]
            now = {number: i for i, number in enumerate(before)}
            optimizer.load_state_dict(
                {
                    "state": {now[n]: states[n] for n in before if n in states},
                    "param_groups": [
                        {**group, "params": [now[n] for n in group["params"]]}
                        for group in own
                    ],
                }
            )
        self.param_groups = [g for each in self.optimizers for g in each.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not here: add a group to one of those inside, and build this anew.

        Args:
            param_group: The group.

        Raises:
            RuntimeError: Always.
        """
        if self.optimizers:
            raise RuntimeError(
                "Several: add the group to one of the optimizers inside, and build "
                "Several anew"
            )
        super().add_param_group(param_group)


class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers as one; what is written goes to its owner."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, p: Tensor) -> Any:
        for optimizer in self._optimizers:
            if p in optimizer.state:
                return optimizer.state
        raise KeyError(p)

    def __getitem__(self, p: Tensor) -> Any:
        return self._of(p)[p]

    def __setitem__(self, p: Tensor, state: Any) -> None:
        for optimizer in self._optimizers:
            if any(
                p is own for group in optimizer.param_groups for own in group["params"]
            ):
                optimizer.state[p] = state
                return
        raise KeyError(p)

    def __delitem__(self, p: Tensor) -> None:
        del self._of(p)[p]

    def __iter__(self) -> Iterator[Tensor]:
        return (p for optimizer in self._optimizers for p in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def __copy__(self) -> dict[Tensor, Any]:
        return dict(self)
