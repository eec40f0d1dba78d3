"""The gradient that is not here yet.

Under a schedule that updates before the next forward, `p.grad` between backward and
step cannot be read: the second half of the exchange has not run. A `Promise` stands in
its place. It lets a GradScaler do its work through the owners' parts, lets gradients be
zeroed, and refuses everything else by name, instead of letting a norm of nothing be
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

_METADATA = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_ZERO = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


# Called with a promise, found_inf and inv_scale.
Unscale: TypeAlias = Callable[["Promise", Tensor, Tensor], None]


class Promise(Tensor):
    """Shape, dtype and device of a parameter's gradient; no values."""

    zeroed: bool
    unscale: Unscale

    @staticmethod
    def of(param: Tensor, unscale: Unscale) -> Promise:
        """A promise of `param`'s gradient.

        `unscale(promise, found_inf, inv_scale)` is called once, with any of them, when
        a GradScaler unscales all gradients of a dtype and device.
        """
        promise: Promise = Tensor._make_wrapper_subclass(
            Promise, param.size(), dtype=param.dtype, device=param.device
        )
        promise.zeroed = False
        promise.unscale = unscale
        return promise

    # The stubs lose the keyword's name, and declare the dispatcher without `cls`.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Promise(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            return args[0]
        if func in _ZERO:
            return _zero(args[0])
        if func is _UNSCALE:
            return _unscale(*args)
        raise RuntimeError(
            f"{func.__name__} on the gradient of a parameter that the 'dear' schedule "
            "updates before the next forward: the gradient is not here yet. Clip with "
            "sync.clip_grad_norm_(max_norm); read gradients after "
            "sync.gather_gradients() (on every rank); accumulate inside "
            "sync.no_sync(); or use a schedule that updates at step(), such as 'wfbp'"
        )


def _zero(target: Tensor | Sequence[Tensor]) -> Tensor | None:
    for tensor in [target] if isinstance(target, Tensor) else target:
        if isinstance(tensor, Promise):
            tensor.zeroed = True
        else:
            tensor.zero_()
    return target if isinstance(target, Tensor) else None


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    promises = [grad for grad in grads if isinstance(grad, Promise)]
    here = [grad for grad in grads if not isinstance(grad, Promise)]
    if here:
        torch._amp_foreach_non_finite_check_and_unscale_(here, found_inf, inv_scale)
    promises[0].unscale(promises[0], found_inf, inv_scale)
