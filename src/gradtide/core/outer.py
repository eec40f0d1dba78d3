"""The outer optimizer: what is made of the mean of steps before parameters have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.core.fields import check_fields
from gradtide.core.torch_internals import foreach_add_, foreach_mul_


@dataclass(frozen=True)
class OuterSGD:
    """Take the mean of what all ranks did in a round for a step of SGD.

    With m the mean of the changes of a parameter and v its outer momentum, an exchange
    makes of the parameters x on which the ranks agreed last

        v = momentum * v + m
        x = x + lr * v                   or, with Nesterov's momentum,
        x = x + lr * (m + momentum * v)

    DiLoCo (Douillard et al., arXiv:2311.08105) has lr=0.7, momentum=0.9 and
    nesterov=True. All ranks compute it alike, so it costs no message; a momentum takes
    as much memory as the parameters.

    Args:
        lr: The outer learning rate, above 0. The default, 1.0, without momentum is the
            plain mean of the ranks' parameters.
        momentum: The outer momentum, from 0, which is the default, to below 1.
        nesterov: Whether it is Nesterov's; it needs a momentum above 0.

    Raises:
        ValueError: A field is outside its range, or Nesterov has no momentum.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lr <= 0:
            raise ValueError(f"OuterSGD(lr={self.lr!r}): above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"OuterSGD(momentum={self.momentum!r}): from 0 to below 1")
        if self.nesterov and not self.momentum:
            raise ValueError("OuterSGD(nesterov=True): with a momentum above 0")

    @torch.no_grad()
    def move(
        self, shared: list[Tensor], means: Sequence[Tensor], velocity: list[Tensor]
    ) -> None:
        """Move parameters by the means of steps, in place.

        Args:
            shared: The parameters on which the ranks agreed last.
            means: Of each, the mean of what the ranks did to it.
            velocity: Of each, the outer momentum; empty without any.
        """
        means = list(means)
        if not velocity:
            foreach_add_(shared, means, alpha=self.lr)
            return
        foreach_mul_(velocity, self.momentum)
        foreach_add_(velocity, means)
        if self.nesterov:
            foreach_add_(shared, means, alpha=self.lr)
        own = self.lr * (self.momentum if self.nesterov else 1.0)
        foreach_add_(shared, velocity, alpha=own)
