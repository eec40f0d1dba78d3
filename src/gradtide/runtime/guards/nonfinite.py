"""Gradients that are not numbers, where not everything travels.

What is selected may be infinite or NaN and is averaged like all else, so a GradScaler
finds it in `.grad` on every rank and skips the step. But what is selected is not all
that there is, and the residual would poison later steps: so every rank tells the
others, all of them forget alike, and a step that is taken nevertheless is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradtide.core.grouped import grouped
from gradtide.core.payload import traits
from gradtide.core.torch_internals import foreach_norm
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.placement import Placement
from gradtide.transport import Transport


class NonFiniteGuard:
    """Which ranks met a gradient that was not finite in the last backward."""

    def __init__(self, placement: Placement, transport: Transport) -> None:
        self.ranks: list[int] = []
        self._placement, self._transport = placement, transport
        self._culprit: str | None = None  # a parameter, as far as this rank knows
        self._own: str | None = None  # that of this rank, in `look`

    def flags(self) -> list[int]:
        """A flag for every rank, to be summed; none where nothing is selected."""
        alarms = [bucket.payload.nonfinite for bucket in self._sparse()]
        if not alarms:
            return []
        rank, size = self._transport.group
        flags = [0] * size
        # Added up on their device first, which the host waits for once.
        found = grouped(alarms, lambda alarm: getattr(alarm, "device", None)).values()
        flags[rank] = int(any(math.isnan(float(sum(own))) for own in found))
        return flags

    def update(self, flags: list[int], culprit: str | None = None) -> None:
        """Take the sum of all ranks' flags, and the parameter if this rank knows it."""
        shards = self._placement.shards
        if flags and shards:  # all parts of a parameter are dealt with alike
            flags = shards.everywhere(
                torch.tensor(flags, dtype=torch.int64, device="cpu")
            ).tolist()
        self.ranks = [rank for rank, flag in enumerate(flags) if flag]
        self._culprit = culprit

    def look(self) -> list[int]:
        """Flags as those above, of gradients that stay this rank's own, in `.grad`."""
        self._own = not_finite(self._grads())
        rank, size = self._transport.group
        flags = [0] * size
        flags[rank] = int(self._own is not None)
        return flags

    def hear(self, flags: list[int]) -> None:
        """Take the sum of all ranks' flags after `look`.

        A rank that has none marks a gradient: a GradScaler skips everywhere then.
        """
        self.update(flags, self._own)
        if self.ranks and self._own is None:
            for grad in list(self._grads().values())[:1]:
                grad[(0,) * grad.dim()] = math.nan

    def _grads(self) -> dict[str, Tensor]:
        return {
            slot.name: grad
            for slot in self._placement.slots
            if (grad := slot.grad) is not None and grad.numel()
        }

    def forget(self) -> None:
        """After an alarm drop what is not finite, and what was learned from it.

        Nothing may be in flight. The means stay; if all that travelled was finite, the
        first of them is marked, so that a GradScaler finds it.
        """
        if not self.ranks:
            return
        found = (bucket.mean for bucket in self._sparse())
        means = [mean for mean in found if mean is not None and len(mean)]
        self._culprit = self._search()
        if all(is_finite(mean) for mean in means):
            for mean in means[:1]:
                mean[0] = math.nan
                # A GradScaler may have asked below autograd, where torch counts no
                # writes: who keeps the memory has to see that somebody wrote there.
                increment_version(mean)
        for bucket in self._sparse():
            payload = bucket.payload
            payload.nonfinite = 0.0
            if not bucket.residual_empty:
                payload.flat.nan_to_num_(0.0, 0.0, 0.0)
            # What ranks have in common is damaged on all of them, or on none.
            for key, value in list(payload.state.items()):
                if key in bucket.per_entry:
                    value.nan_to_num_(0.0, 0.0, 0.0)
                elif not is_finite(value):
                    del payload.state[key]

    def refuse(self) -> None:
        """Raise RuntimeError, on every rank, if a step would destroy the model.

        Nothing may be in flight.
        """
        if not self.ranks:
            return
        found = self._transport.gather_objects(self._culprit or self._search())
        name = next((found[r] for r in self.ranks if found[r]), "a parameter")
        raise RuntimeError(
            f"the gradient of {name} is infinite or NaN on rank "
            f"{', '.join(map(str, self.ranks))}: lower the learning rate, clip, or "
            "train with torch.amp.GradScaler, which skips such steps"
        )

    def _sparse(self) -> list[GradientBucket]:
        buckets = self._placement.buckets
        return [bucket for bucket in buckets if traits(bucket.collective).residual]

    def _search(self) -> str | None:
        """The parameter whose mean, or this rank's residual, is not finite."""
        for bucket in self._sparse():
            for slot, left in zip(bucket.slots, bucket.views, strict=True):
                mean = None if bucket.mean is None else slot.of(bucket.mean)
                if not (is_finite(left) and (mean is None or is_finite(mean))):
                    return slot.name
        return None


def is_finite(x: Tensor) -> bool:
    """Whether all of `x` is; waits for the device."""
    return bool(x.isfinite().all())


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that is infinite or NaN; waits for the device once.

    Where a 2-norm is finite, so are all entries; where it is not, it may be too large
    for its type. On a CPU it takes a sixteenth of the time of the largest entry.
    """
    if not tensors:
        return None
    norms = foreach_norm(list(tensors.values()))
    where = norms[0].device
    told = torch.stack([norm.to(where, torch.float64) for norm in norms]).tolist()
    doubtful = [
        n for n, norm in zip(tensors, told, strict=True) if not math.isfinite(norm)
    ]
    return next((n for n in doubtful if not is_finite(tensors[n])), None)
