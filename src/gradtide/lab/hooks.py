"""DDP communication hooks that halve the bytes, for CPU as well.

torch's own `bf16_compress_hook` refuses CPU tensors, and does so by the function's
name, although Gloo adds bf16 well. This module does without the future import: DDP
compares the hook's annotations with classes, not with strings.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # mypy: torch hides dist.GradBucket
from torch.futures import Future


def casting(dtype: torch.dtype) -> Callable[[object, GradBucket], Future[Tensor]]:
    """Average in `dtype`: the casts' rounding, and that of the sum, are lost."""

    def cast_and_all_reduce(
        state: object, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        # Divided first: a sum over many ranks could leave the range of fp16.
        wire = gradients.to(dtype).div_(dist.get_world_size())
        work = dist.all_reduce(wire, async_op=True)
        assert work is not None
        averaged: Future[Tensor] = work.get_future().then(
            lambda done: gradients.copy_(done.value()[0])
        )
        return averaged

    return cast_and_all_reduce
