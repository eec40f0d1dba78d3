"""A communication hook of the user's, in the place of a scheme's exchange.

torch's DistributedDataParallel gives such a hook one bucket of gradients after the
other, and what its future brings takes the place of the bucket. A hook exchanges over
process groups of the user's own. So it is called on the training thread, in the order
of the buckets: nothing that the program sends itself can come between.

[Note: chains] Some hooks (PowerSGD's) send again when a future is done. On CPUs that
happens on threads of Gloo, so those of two buckets would be sent in any order, and not
in the same one on every rank. A hook is therefore called when the one before is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradtide.runtime.checkpoint import Saved
from gradtide.runtime.exchange import Exchange, Surroundings
from gradtide.runtime.layout.buckets import GradientBucket


class HookBucket:
    """A bucket as a hook sees it: with the methods of torch's `dist.GradBucket`.

    Its buffer is padded with a few zeros: every parameter has a multiple of P elements.
    """

    def __init__(self, bucket: GradientBucket, index: int, last: bool) -> None:
        self._bucket, self._index, self._last = bucket, index, last

    def index(self) -> int:
        """Which bucket it is, in the order in which they leave."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last of this backward."""
        return self._last

    def buffer(self) -> Tensor:
        """All gradients as one flat tensor."""
        return self._bucket.payload.flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Overwrite all gradients."""
        self._bucket.payload.flat.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """The gradients, as views of the buffer in the parameters' shapes."""
        return list(self._bucket.views)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of their gradients."""
        return [slot.param for slot in self._bucket.slots]


class HookExchange:
    """The exchange of gradients by a hook: all else is done as `gradients` does it."""

    eager, apart = True, False
    saved: Sequence[Saved] = ()

    def __init__(
        self,
        around: Surroundings,
        gradients: Exchange,
        state: object,
        hook: Callable[..., Any],
    ) -> None:
        self._placement, self._telemetry = around.placement, around.engine.telemetry
        self._state, self._hook = state, hook
        self._futures: dict[GradientBucket, Any] = {}
        self._before: Any = None  # the future of the bucket before, on a CPU
        self.fill, self.apply = gradients.fill, gradients.apply
        self.agree, self.before_update = gradients.agree, gradients.before_update
        self.after_update, self.left = gradients.after_update, gradients.left
        self.close, self.take_buffers = gradients.close, gradients.take_buffers
        self.shared_parameters = gradients.shared_parameters

    def now(self) -> HookExchange:
        return self

    def next(self) -> HookExchange:
        return self

    def launch(self, bucket: Any, hold: bool) -> None:
        """Call the hook; TypeError if it returns no future."""
        if self._before is not None:  # [Note: chains]
            self._before.wait()
            self._before = None
        buckets = self._placement.buckets
        index, last = buckets.index(bucket), bucket is buckets[-1]
        future = self._hook(self._state, HookBucket(bucket, index, last))
        if not callable(getattr(future, "wait", None)):
            raise TypeError(
                f"{self._name} returned a {type(future).__name__}: a communication "
                "hook returns a torch.futures.Future of one tensor"
            )
        self._futures[bucket] = future
        if bucket.payload.flat.device.type == "cpu":
            self._before = future

    def finish(self, bucket: GradientBucket) -> None:
        """Wait for what takes the bucket's place, if the hook was called for it."""
        if bucket not in self._futures:
            return
        found = self._futures.pop(bucket).wait()
        if isinstance(found, list | tuple) and len(found) == 1:  # as of an all-reduce
            (found,) = found
        flat = bucket.payload.flat
        if not isinstance(found, Tensor) or found.numel() != flat.numel():
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found)
            raise TypeError(
                f"the future of {self._name} brought {what}: it has to be one tensor "
                f"with the {flat.numel()} elements of bucket.buffer()"
            )
        with torch.no_grad():
            if found.data_ptr() != flat.data_ptr():
                flat.copy_(found.view(-1))
        bucket.take(flat)
        self._telemetry.select(flat.numel(), flat.numel())

    @property
    def _name(self) -> str:
        return getattr(self._hook, "__qualname__", repr(self._hook))
