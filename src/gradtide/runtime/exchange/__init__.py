"""What a step exchanges: one file for each kind, behind one protocol.

`gradients` exchanges means of gradients, `hook` has a hook of the user's do it, `steps`
exchanges what each step of the optimizer did, and `rounds` what several did. K-FAC
(`preconditioned`) is a stage of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.core.step import Step
from gradtide.runtime.checkpoint import Saved
from gradtide.runtime.guards.nonfinite import NonFiniteGuard
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.placement import Placement
from gradtide.runtime.notices import Notices


class Exchange(Protocol):
    """What of a bucket leaves in a step, and what becomes of its mean.

    Its methods are called under `torch.no_grad`, by `runtime.actions`.

    Attributes:
        eager: Its buckets leave in backward, as gradients fill them. Otherwise
            gradients stay in `.grad`, and buckets leave after the optimizer's step.
        apart: Every rank's optimizer steps by what this rank has, so that it has a
            state of its own.
    """

    eager: bool
    apart: bool

    @property
    def saved(self) -> Sequence[Saved]:
        """What is saved of it, in the order in which it is loaded."""

    def now(self) -> Exchange:
        """Who exchanges in this step: itself, or others before its time has come."""

    def next(self) -> Exchange:
        """All ranks have begun a backward: who exchanges in its step."""

    def fill(self, bucket: Any) -> None:
        """Put in what is to leave: any bucket of the plan, as a `Driver` does."""

    def launch(self, bucket: Any, hold: bool) -> None:
        """Send any bucket of the plan to its cut (`hold`), or to its end."""

    def finish(self, bucket: GradientBucket) -> None:
        """Wait for a bucket's mean, if it is under way."""

    def agree(self, leaving: int | None) -> None:
        """Backward is over, and all ranks have to hear what they need for the step.

        `leaving` is the fragment that leaves after it, where a step exchanges one.
        """

    def before_update(self, fresh: bool) -> None:
        """The optimizer's step begins; `fresh` if gradients are."""

    def after_update(self) -> None:
        """It is over; what is to leave after it has not left."""

    def left(self) -> None:
        """What was to leave after it has left."""

    def apply(self, buckets: Sequence[GradientBucket]) -> None:
        """Change the parameters of some buckets by their means."""

    def take_buffers(self) -> bool:
        """Whether a forward that begins now is to have rank 0's buffers first."""

    def close(self, leave: Callable[[], None]) -> None:
        """End before its time what takes several steps: have all of it `leave`."""

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Have the module compute with what ranks agreed on last."""


@dataclass(frozen=True)
class Surroundings:
    """What an exchange works with: a replica's own parts."""

    model: nn.Module
    step: Step
    engine: Engine
    placement: Placement
    guard: NonFiniteGuard
    notices: Notices
    optimizer: Optimizer
