"""What stands in `.grad` while the gradients are still on their way.

[Note: answers] A `DeferredGrad` has no values. It can be zeroed; it notes by what it is
scaled; and it tells its 2-norm, and whether it is finite, from what all ranks have
added up at the end of backward. Whatever else is done to it has the gradients delivered
first: this rank starts the second halves that step() would have started, in the same
order, so that what is on the wire is what the other ranks have. So one rank alone may
read or change gradients, as under DDP, and no question is a collective call.

One that the program keeps beyond its step has its own values (`Past`), as under DDP.

[Note: collected] Python does not see that a parameter holds what is in its `.grad`. One
that kept the replica there would never be collected, nor would threads and connections
end, where a program lets go of a model between backward and step, as after an error.

A delivered one stays in its place until step(): a norm has to have the same bits on all
ranks, whether they had it delivered or not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from gradtide.core import torch_internals
from gradtide.core.devices import sent
from gradtide.core.grouped import grouped
from gradtide.runtime.deferred.due import METADATA
from gradtide.runtime.deferred.partial_norms import Scale, Scales
from gradtide.runtime.layout.slots import Slot

aten = torch.ops.aten


class GradientSource(Protocol):
    """Where a deferred gradient comes from, and what is known of it before."""

    def awaits(self, grad: DeferredGrad) -> bool:
        """Whether a step() is to come that will have it delivered."""

    def have(self, grad: DeferredGrad) -> None:
        """Have the values delivered, of this one at least."""

    def edit(self, grad: DeferredGrad) -> None:
        """Have the values delivered, which are about to be changed."""

    def scale(self, grad: DeferredGrad, function: Scale, by: Any) -> None:
        """Scale the values, which are here."""

    def square(self, grad: DeferredGrad) -> float | None:
        """The square of the 2-norm as exchanged; None if it is not known."""

    def finite(self, grads: Sequence[DeferredGrad]) -> bool | None:
        """Whether some are, on all ranks; None if that is not known."""

    def zero(self, grad: DeferredGrad) -> None:
        """It is zeroed, which it knows already."""


class DeferredGrad(Tensor):
    """Shape, dtype and device of a gradient that is not here yet, see [Note: answers].

    What is done to it is noted in `scales` and `zeroed`; `value` is the gradient, once
    it is here, and `before` what it was added to if no rank has any.
    """

    slot: Slot
    scales: Scales
    zeroed: bool
    _source: ref[GradientSource]
    value: Tensor | None
    before: Tensor | None

    @staticmethod
    def of(slot: Slot, source: GradientSource) -> DeferredGrad:
        """What stands for the gradient of a slot's parameter."""
        p = slot.param
        deferred = torch_internals.stand_in(DeferredGrad, p)
        deferred.slot, deferred.source = slot, source
        deferred.renew(None)
        return deferred

    @property
    def source(self) -> GradientSource:
        """Where it comes from, which it does not keep, see [Note: collected]."""
        found = self._source()
        if found is None:
            raise RuntimeError(
                "a deferred gradient cannot be read when its model and its replica are "
                "gone: clone what is to be kept"
            )
        return found

    @source.setter
    def source(self, source: GradientSource) -> None:
        self._source = ref(source)

    def renew(self, before: Tensor | None) -> None:
        """Stand for another gradient."""
        self.scales, self.zeroed = [], False
        self.value, self.before = None, before

    def fill(self, mean: Tensor | None) -> None:
        """The mean is here, or no rank has any; it is scaled as was noted."""
        if mean is not None:
            self.before = None
        self.value = self.before if mean is None else mean
        if self.value is not None:
            for function, by in self.scales:
                function(self.value, by)

    def leave(self) -> None:
        """The mean is with its owner, and will not come."""
        self.source = ELSEWHERE
        if self.zeroed:
            ELSEWHERE.zero(self)

    # The stubs lose the keyword's name, and declare the dispatcher without `cls`.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredGrad(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or func in _FUNCTIONS:
            with torch_internals.without_torch_function():
                return func(*args, **kwargs)
        # Here and not below autograd, where torch counts no writes, nor knows views.
        args, kwargs = _real((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            return args[0]
        if func in _ANSWERS:
            answer = _ANSWERS[func](*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if torch_internals.writes(func):
            for grad in torch_internals.tree_leaves((args, kwargs)):
                if isinstance(grad, DeferredGrad):
                    grad.source.edit(grad)
        args, kwargs = _real((args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_real(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plainly: Any = _real(self).__reduce_ex__
        return plainly(protocol)


class Past:
    """The source of those that were kept beyond their step: they are here already."""

    def awaits(self, grad: DeferredGrad) -> bool:
        return False

    def have(self, grad: DeferredGrad) -> None: ...
    def edit(self, grad: DeferredGrad) -> None: ...
    def scale(self, grad: DeferredGrad, function: Scale, by: Any) -> None: ...
    def square(self, grad: DeferredGrad) -> None: ...
    def finite(self, grads: Sequence[DeferredGrad]) -> None: ...
    def zero(self, grad: DeferredGrad) -> None: ...


PAST = Past()


class Elsewhere:
    """The source of those whose means only the owners of their parameters have had."""

    def awaits(self, grad: DeferredGrad) -> bool:
        return False

    def have(self, grad: DeferredGrad) -> None:
        raise RuntimeError(
            f"the mean gradient of {grad.slot.name} went to the rank that owns it, and "
            "to no other: call sync.gather_gradients() on every rank before step() "
            "where gradients are read, and zero them after each step"
        )

    edit = have

    def scale(self, grad: DeferredGrad, function: Scale, by: Any) -> None: ...
    def square(self, grad: DeferredGrad) -> None: ...
    def finite(self, grads: Sequence[DeferredGrad]) -> None: ...

    def zero(self, grad: DeferredGrad) -> None:
        p = grad.slot.param
        if p.grad is grad:
            p.grad = torch.zeros_like(p)


ELSEWHERE = Elsewhere()


def _real(tree: Any) -> Any:
    """The same arguments, with gradients in the place of deferred ones."""
    return torch_internals.tree_map_only(DeferredGrad, _values, tree)


def _values(grad: DeferredGrad) -> Tensor:
    grad.source.have(grad)
    if grad.value is None:  # what was asked may have found that another is to be
        grad.source.have(grad)
    if grad.value is None:  # no rank used the parameter, and step() passes over it
        return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    return grad.value


def _each(target: Any) -> Sequence[Tensor]:
    return [target] if isinstance(target, Tensor) else target


def _zero(target: Any) -> Any:
    for grad in _each(target):
        if isinstance(grad, DeferredGrad):
            grad.zeroed = True
            if grad.value is not None:
                grad.value.zero_()
            grad.source.zero(grad)
        else:
            grad.zero_()
    return target if isinstance(target, Tensor) else None


def _scaling(function: Scale) -> Callable[..., Any]:
    """The answer of what scales in place, by one number."""

    def answer(target: Any, by: Any) -> Any:
        if not isinstance(by, int | float | Tensor):
            return NotImplemented
        if isinstance(by, Tensor) and (by.numel() != 1 or type(by) is not Tensor):
            return NotImplemented
        grads = _each(target)
        for grad in grads:
            if not isinstance(grad, DeferredGrad):
                function(grad, by)
        scale([g for g in grads if isinstance(g, DeferredGrad)], function, by)
        return target if isinstance(target, Tensor) else None

    return answer


def scale(grads: Sequence[DeferredGrad], function: Scale, by: Any) -> None:
    """Scale deferred gradients: those that are here now, the others when they are."""
    host = not (isinstance(by, Tensor) and by.is_cuda)
    if host and float(by) == 1.0:
        return
    kept = by.clone() if isinstance(by, Tensor) else by  # the program may change it
    for grad in grads:
        if not grad.source.awaits(grad):
            function(_values(grad), by)
            continue
        grad.scales.append((function, kept))
        if grad.value is not None:
            grad.source.scale(grad, function, by)


def _norm(
    target: Any,
    ord: Any = 2,  # these are torch's names
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Each one's 2-norm, from what all ranks have added up."""
    if isinstance(dim, torch.dtype):  # norm() has it here
        dim, dtype = None, dim
    if keepdim or dim not in (None, []) or float(2 if ord is None else ord) != 2:
        return NotImplemented
    norms = _norms(_each(target), dtype)
    if norms is None:
        return NotImplemented
    return norms[0] if isinstance(target, Tensor) else norms


def _norms(grads: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor] | None:
    """The 2-norm of each gradient; None where that of a deferred one is not known."""
    deferred = [grad for grad in grads if isinstance(grad, DeferredGrad)]
    known: dict[DeferredGrad, float] = {}
    for grad in deferred:
        square = 0.0 if grad.zeroed else grad.source.square(grad)
        if square is None:
            return None
        known[grad] = math.sqrt(square)
    told: dict[Tensor, Tensor] = {}
    # Those of one kind in one tensor: a device is sent one, and not each by itself.
    kinds = grouped(known, lambda g: ((dtype or g.dtype).to_real(), g.device))
    for (kind, device), members in kinds.items():
        own = torch.tensor([known[g] for g in members], dtype=kind, device="cpu")
        for grad, norm in zip(members, sent(own, device).unbind(), strict=True):
            for function, by in grad.scales:
                function(norm, by)
            told[grad] = torch.abs_(norm)
    return [
        told[grad] if grad in told else torch.linalg.vector_norm(grad, dtype=dtype)
        for grad in grads
    ]


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Any:
    """A GradScaler's check, on all ranks, and its scaling."""
    deferred = [grad for grad in grads if isinstance(grad, DeferredGrad)]
    finite = deferred[0].source.finite(deferred)
    if finite is None:
        return NotImplemented
    here = [grad for grad in grads if not isinstance(grad, DeferredGrad)]
    if here:
        torch_internals.unscale_(here, found_inf, inv_scale)
    if not finite:
        found_inf.fill_(1.0)
    scale(deferred, Tensor.mul_, inv_scale)
    return None


_SAME = {aten.detach.default, aten.alias.default}
_MUL, _DIV = _scaling(Tensor.mul_), _scaling(Tensor.div_)
_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.zero_.default: _zero,
    torch_internals.FOREACH_ZERO: _zero,
    aten.mul_.Tensor: _MUL,
    aten.mul_.Scalar: _MUL,
    **dict.fromkeys(torch_internals.FOREACH_MUL, _MUL),
    aten.div_.Tensor: _DIV,
    aten.div_.Scalar: _DIV,
    **dict.fromkeys(torch_internals.FOREACH_DIV, _DIV),
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dtype: _norm,
    torch_internals.FOREACH_NORM: lambda x, ord=2, dtype=None: _norm(
        x, ord, dtype=dtype
    ),
    torch_internals.UNSCALE: _unscale,
}
# By which these are called; all else has gradients delivered first.
_FUNCTIONS = {
    *(Tensor.detach, Tensor.zero_, torch_internals.foreach_zero_),
    *(Tensor.norm, torch.norm),
    *(torch.linalg.vector_norm, torch.linalg.norm, torch_internals.foreach_norm),
    *(Tensor.mul_, Tensor.__imul__, torch_internals.foreach_mul_),
    *(Tensor.div_, Tensor.__itruediv__, torch_internals.foreach_div_),
    torch_internals.unscale_,
    torch_internals.get_data,
}
