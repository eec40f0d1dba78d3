"""Momentum and clipping before selection: a wrapper for any collective."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradtide.core.ops import Cut, Flow, Group, Mean
from gradtide.core.payload import (
    Collective,
    Payload,
    Traits,
    dense_next,
    inner,
    layers,
    traits,
)
from gradtide.selectors.kernels import above

# Keys of checkpoints, which stay as they are.
VELOCITY, RESIDUAL = "corrected.velocity", "corrected.remainder"


@dataclass(frozen=True)
class MomentumCorrection:
    """Compute momentum before selection, so that late entries arrive with theirs.

    This is the momentum correction of Deep Gradient Compression (Lin et al., ICLR
    2018). Every rank keeps a velocity u = a u + b g of its own gradients g, and offers
    it to the collective in their place, on top of the residual. Where entries are taken
    out, the velocity is set to zero (momentum factor masking), lest it push twice in an
    old direction. The factors a and b are those of the optimizer's momentum, without
    which it steps for as long; so it needs `replicate`, with SGD, Adam or AdamW. A
    bucket that travels densely is not masked: the mean is then the momentum buffer of
    SGD.

    Cost: the rounds and bytes of the collective. In memory, two tensors as long as the
    bucket; in time, six passes over it, seven under Adam, and with `clip` three more
    and a copy. Without momentum it is one tensor, a pass, and those of `clip`.

    Residual: that of the collective. The conservation law holds for what is offered,
    which is `a u` more than what was in the bucket, and less what was clipped. What is
    clipped is lost.

    Args:
        collective: What selects entries.
        momentum: No hyper-parameter. The training hands the factors (a, b) over in
            every step, and a number here is refused.
        clip: The 2-norm, above 0, that the gradients of all ranks of a bucket may have
            together: a rank's fresh gradients are scaled to at most clip / sqrt(P).
            None, the default, scales nothing, because `Replica.clip_grad_norm_` clips
            the mean.

    Raises:
        ValueError: `momentum` is a number, or `clip` is not above 0 and finite.
    """

    collective: Collective
    # The factors a and b: no hyper-parameter, but handed over in every step.
    momentum: tuple[float, float] = field(default=(0.0, 1.0), repr=False, compare=False)
    clip: float | None = None

    traits = Traits(
        transparent=True,
        scans=True,
        per_entry=(VELOCITY, RESIDUAL),
        uses_optimizer_momentum=True,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.momentum, tuple):
            raise ValueError(
                f"MomentumCorrection(momentum={self.momentum!r}): it uses the "
                "optimizer's own; leave the number out here, and give it to the "
                "optimizer"
            )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(
                f"MomentumCorrection(clip={self.clip}): a norm above 0, or None"
            )

    def with_momentum(self, a: float, b: float) -> MomentumCorrection:
        """Return the same with these factors of momentum, for one exchange."""
        return replace(self, momentum=(a, b))

    def reduce(self, payload: Payload, group: Group) -> Flow:
        momentum, share = self.momentum
        # One rank has no residual, and its optimizer keeps the momentum.
        if self.clip is None and not momentum and group.size == 1:
            return (yield from self.collective.reduce(payload, group))
        self._offer(payload, group.size, momentum, share)
        before = payload.num_sent
        flow = self.collective.reduce(payload, group)
        answer, result = None, None  # the result, or where it is
        try:
            while True:
                asked = flow.send(answer)
                match asked:
                    case Cut(part=found) | Mean(tensor=found):
                        result = found
                answer = yield asked
        except StopIteration as stop:
            result = stop.value
            return stop.value  # type: ignore[no-any-return]
        finally:
            # Also if it is closed at its cut (a skipped step): what is gone was sent.
            flow.close()
            whole = payload.num_sent - before == len(payload.flat)
            self._remember(payload, result, whole)

    def _offer(
        self, payload: Payload, size: int, momentum: float, share: float
    ) -> None:
        """Clip the fresh gradient, take `share` of it, and add what it continues."""
        flat = payload.flat
        residual = payload.state.get(RESIDUAL)
        if residual is None:
            # What others left here is no gradient of this step.
            residual = torch.zeros_like(flat) if payload.left is None else payload.left
            payload.state[RESIDUAL] = residual
        if self.clip is not None:
            kept = share * _share(flat - residual, self.clip / math.sqrt(size))
            torch.lerp(residual, flat, kept.to(flat.dtype), out=flat)
        elif share != 1:
            torch.lerp(residual, flat, share, out=flat)
        if momentum or VELOCITY in payload.state:
            velocity = payload.state.setdefault(VELOCITY, torch.zeros_like(flat))
            flat.add_(velocity, alpha=momentum)
            torch.sub(flat, residual, out=velocity)
            residual.copy_(flat)

    def _remember(self, payload: Payload, result: Tensor | None, whole: bool) -> None:
        """Remember the residual, and stop the velocity of what was taken out.

        Not where the `whole` bucket travelled, at the end of which only what a wire
        rounded off may be left: the mean is the momentum then.
        """
        if RESIDUAL not in payload.state:  # closed late: the bucket has begun anew
            return
        velocity, flat = payload.state.get(VELOCITY), payload.flat
        begin = -1 if result is None else result.data_ptr() - flat.data_ptr()
        if 0 <= begin < flat.nbytes:  # memory of the bucket's own: nothing is left
            payload.state[RESIDUAL].zero_()
            if velocity is not None:
                # A gradient that was not finite must not stay for the steps to come.
                velocity.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            return
        residual = payload.state[RESIDUAL]
        if velocity is not None and not whole:
            # Until now it held what was offered; here, what of that is gone.
            torch.sub(residual, payload.flat, out=residual)
            gone = above(residual, 0.0, len(residual))
            velocity.index_fill_(0, gone.long(), 0)
        residual.copy_(payload.flat)


def _share(gradient: Tensor, limit: float) -> Tensor:
    """The share of a gradient that its norm may keep; all if it is not finite.

    What is not finite is for the collective to find, and not to be spread.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, dtype=wide)
    share = (limit / norm).clamp_(max=1.0)
    return torch.where(norm.isfinite(), share, torch.ones_like(share))


def with_momentum(collective: Any, a: float, b: float) -> Any:
    """The collective, with these factors wherever it computes momentum."""
    if traits(collective).uses_optimizer_momentum:
        return collective.with_momentum(a, b)
    wrapped = inner(collective)
    if wrapped is None:
        return collective
    return replace(collective, collective=with_momentum(wrapped, a, b))


def moves(collective: object, state: dict[str, Tensor]) -> bool:
    """Whether the next exchange computes momentum; `state` is the payload's."""
    for each in layers(collective):
        if traits(each).uses_optimizer_momentum:
            return True
        if dense_next(each, state):
            return False
    return False


def forget(state: dict[str, Tensor]) -> None:
    """Begin anew: what is exchanged next knows nothing of momentum."""
    for key in (VELOCITY, RESIDUAL):
        state.pop(key, None)


def uses_optimizer_momentum(collective: object) -> bool:
    """Whether a collective computes the optimizer's momentum, or may some day."""
    return any(traits(each).uses_optimizer_momentum for each in layers(collective))
