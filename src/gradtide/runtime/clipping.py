"""What the owners of the mean's parts compute on behalf of all ranks.

That is the norm for clipping and a GradScaler's check, each on 1/P of the data. Of the
mean of a bucket that is held, a part is known to its owner only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradtide.core.engine import Engine
from gradtide.core.ops import AllGather, AllReduce
from gradtide.core.step import Stage
from gradtide.runtime.buckets import GradientBucket, lives_in


def clip(
    engine: Engine,
    buckets: Sequence[GradientBucket],
    max_norm: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale the means to a 2-norm of at most `max_norm`; returns the norm before."""
    present = [b for b in buckets if b.stage is Stage.HELD or b.mean is not None]
    shares = [_share(engine, bucket) for bucket in present]
    total = _norm(engine, [own for own, _ in shares])
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of the averaged gradients is {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    # Only the host's value is free to read.
    if factor.is_cuda or float(factor) != 1.0:
        for _, whole in shares:
            whole.mul_(factor.to(whole.dtype))
    return total


def unscale(
    engine: Engine,
    held: Sequence[GradientBucket],
    like: Tensor,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """A GradScaler's check and scaling, for all held means of one dtype and device."""
    wholes = [_share(engine, bucket)[1] for bucket in held]
    kind = like.dtype, like.device
    alike = [whole for whole in wholes if (whole.dtype, whole.device) == kind]
    own = torch.zeros_like(found_inf)
    torch._amp_foreach_non_finite_check_and_unscale_(alike, own, inv_scale)
    anywhere = engine.ask("found_inf", AllReduce(own))()
    found_inf.copy_(torch.maximum(found_inf, anywhere.clamp(max=1.0)))


def _share(engine: Engine, bucket: GradientBucket) -> tuple[Tensor, Tensor]:
    """This rank's part of the mean, and all of the mean that this rank holds."""
    if bucket.stage is Stage.HELD and bucket.flight is not None:
        part, mean = engine.held(bucket.flight)
        if part is not None:
            return part, part
        assert mean is not None
    else:
        mean = bucket.mean
        assert mean is not None
        for slot in bucket.slots:
            grad = slot.param.grad
            if grad is not None and not lives_in(grad, mean):
                raise RuntimeError(
                    f"{slot.name}.grad is no longer the tensor that backward left "
                    "there: clip with torch.nn.utils.clip_grad_norm_ instead"
                )
    rank, size = engine.group
    return mean.view(size, -1)[rank], mean


def _norm(engine: Engine, parts: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all ranks' parts together."""
    half = (torch.float16, torch.bfloat16)
    device = parts[0].device if parts else "cpu"
    own = torch.zeros(1, dtype=torch.float64, device=device)
    for part in parts:
        dtype = torch.float32 if part.dtype in half else part.dtype
        norm = torch.linalg.vector_norm(part, dtype=dtype)
        own += norm.double().square().to(own.device)
    all_parts = engine.ask("norm", AllGather(own))()
    double = any(part.dtype == torch.float64 for part in parts)
    return torch.sqrt(all_parts.sum()).to(torch.float64 if double else torch.float32)
