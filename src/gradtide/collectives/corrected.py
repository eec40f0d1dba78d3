"""Momentum and clipping before selection: a wrapper for any collective."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradtide.bucket import Collective, Payload, Traits, layers, traits
from gradtide.ops import Cut, Flow, Group
from gradtide.select.kernels import above

VELOCITY, REMAINDER = "corrected.velocity", "corrected.remainder"


@dataclass(frozen=True)
class Corrected(Traits):
    """Deep Gradient Compression's momentum correction (Lin et al., ICLR 2018).

    Every rank keeps a velocity u = a * u + b * g of its own gradients g and offers it
    to `collective` instead of them, on top of what was left behind. Entries that were
    delayed so arrive with the momentum that they have missed. Where entries were taken
    out, the velocity is set to zero (momentum factor masking), lest it push twice in an
    old direction. The factors a and b are those of the optimizer's momentum, which
    steps without it for as long (`gradtide.momentum`). A bucket that travels densely is
    not masked: the mean is then the momentum buffer of SGD.

    With `clip`, a rank's fresh gradient is scaled to a 2-norm of at most clip / sqrt(P)
    first; the norm is that of the bucket. Nothing stays behind of what is clipped.

    The law holds for what is offered, which is `a * u` more than what was in the
    buffer, and what was clipped less. In `state`: two tensors as long as the bucket
    (the velocity, and the remainder that the fresh gradient is told from, to a rounding
    of their sum). Six passes over memory; three more and a temporary copy with `clip`.
    Adam's momentum takes one more. Without momentum, one tensor, and no pass but those
    of `clip` and a copy; without either, nothing.
    """

    collective: Collective
    # The factors a and b: no hyper-parameter, but handed over in every step.
    momentum: tuple[float, float] = field(default=(0.0, 1.0), repr=False, compare=False)
    clip: float | None = None

    takes_momentum = True
    transparent = True

    def __post_init__(self) -> None:
        if not isinstance(self.momentum, tuple):
            raise ValueError(
                f"Corrected(momentum={self.momentum!r}): it takes over the optimizer's "
                "own momentum; leave the number out here, and give it to the optimizer"
            )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"Corrected(clip={self.clip}): a norm above 0, or None")

    def with_momentum(self, a: float, b: float) -> Corrected:
        """The same with the factors of the optimizer's momentum, for one exchange."""
        return replace(self, momentum=(a, b))

    def reduce(self, load: Payload, group: Group) -> Flow:
        momentum, share = self.momentum
        # A schedule may come down to no momentum; what was remembered goes on.
        if self.clip is None and not momentum and REMAINDER not in load.state:
            return (yield from self.collective.reduce(load, group))
        self._offer(load, group.size, momentum, share)
        flow = self.collective.reduce(load, group)
        answer, result = None, None  # the result: as far as it is known
        try:
            while True:
                asked = flow.send(answer)
                result = asked.part if isinstance(asked, Cut) else result
                answer = yield asked
        except StopIteration as stop:
            result = stop.value
            return stop.value  # type: ignore[no-any-return]
        finally:
            # Also if it is closed at its cut (a skipped step): what is gone was sent.
            flow.close()
            self._settle(load, result is not None and _within(result, load))

    def _offer(self, load: Payload, size: int, momentum: float, share: float) -> None:
        """Clip the fresh gradient, take `share` of it, and add what it continues."""
        flat = load.flat
        remainder = load.state.setdefault(REMAINDER, torch.zeros_like(flat))
        if self.clip is not None:
            kept = share * _share(flat - remainder, self.clip / math.sqrt(size))
            torch.lerp(remainder, flat, kept.to(flat.dtype), out=flat)
        elif share != 1:
            torch.lerp(remainder, flat, share, out=flat)
        if momentum or VELOCITY in load.state:
            velocity = load.state.setdefault(VELOCITY, torch.zeros_like(flat))
            flat.add_(velocity, alpha=momentum)
            torch.sub(flat, remainder, out=velocity)
            remainder.copy_(flat)

    def _settle(self, load: Payload, handed_out: bool) -> None:
        """Remember what was left behind, and stop what was taken out."""
        velocity = load.state.get(VELOCITY)
        if handed_out:
            load.state[REMAINDER].zero_()
            if velocity is not None:
                # A gradient that was not finite must not stay for the steps to come.
                velocity.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            return
        remainder = load.state[REMAINDER]
        if velocity is not None:
            # Until now the remainder held what was offered; here, what of it is gone.
            torch.sub(remainder, load.flat, out=remainder)
            gone = above(remainder, 0.0, len(remainder))
            velocity.index_fill_(0, gone.long(), 0)
        remainder.copy_(load.flat)


def _share(gradient: Tensor, limit: float) -> Tensor:
    """The share of a gradient that its norm may keep; all if it is not finite.

    What is not finite is for the collective to find, and not to be spread.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, dtype=wide)
    share = (limit / norm).clamp_(max=1.0)
    return torch.where(norm.isfinite(), share, torch.ones_like(share))


def _within(part: Tensor, load: Payload) -> bool:
    """Whether memory is the bucket's own: it was handed out, and nothing is left."""
    return 0 <= part.data_ptr() - load.flat.data_ptr() < load.flat.nbytes


def with_momentum(collective: Any, a: float, b: float) -> Any:
    """The collective, with these factors wherever it computes momentum."""
    if hasattr(collective, "with_momentum"):
        return collective.with_momentum(a, b)
    inner = getattr(collective, "collective", None)
    if inner is None:
        return collective
    return replace(collective, collective=with_momentum(inner, a, b))


def moves(collective: object, state: dict[str, Tensor]) -> bool:
    """Whether the next exchange computes momentum; `state` is the payload's."""
    for each in layers(collective):
        if hasattr(each, "with_momentum"):
            return True
        if traits(each).dense_next(state):
            return False
    return False


def takes_over(collective: object) -> bool:
    """Whether a collective computes the optimizer's momentum, or may some day."""
    return any(traits(each).takes_momentum for each in layers(collective))
