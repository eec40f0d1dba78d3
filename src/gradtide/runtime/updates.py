"""What waits for the next forward where updates are deferred.

Between backward and step() a `DeferredGrad` stands in the place of every gradient: the
second half of the exchange has not run. What step() would have done is noted, and
modules that read what is out of date are watched. This module knows parameters,
optimizers and modules; nothing of exchanges, or of when anything happens.

[Note: watch] A module with a hook takes Python's long way into its forward, which in a
model of many small modules costs as much as a layer: so a module has the hook only
while it reads something that is due. The hook runs before the user's own, which may
read too.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.core.autograd import Hook
from gradtide.core.step import Stage
from gradtide.runtime.buckets import GradientBucket, Slot
from gradtide.runtime.due import Aliases, DueParameters, Kind
from gradtide.runtime.momentum import without
from gradtide.runtime.placement import Placement

_METADATA = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_ZERO = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

# It is called with a deferred gradient, found_inf and inv_scale.
Unscale: TypeAlias = Callable[["DeferredGrad", Tensor, Tensor], None]


class Updates:
    """The deferred gradients, the noted step and the watched modules of a replica."""

    def __init__(
        self,
        placement: Placement,
        settle: Callable[[nn.Parameter], None],
        unscale: Unscale,
    ) -> None:
        self._placement, self._unscale = placement, unscale
        self._due = DueParameters(settle)
        self._aliases = Aliases(placement.places)
        self._warned = False
        # Of each bucket its parameters, their classes, and those while they are due.
        self._kinds: dict[GradientBucket, list[tuple[nn.Parameter, Kind, Kind]]] = {}
        # In a list: a tensor's hash is slow for what runs once a parameter and step.
        self._deferred_grads: list[tuple[Slot, nn.Parameter, DeferredGrad]] = []
        self._step: DeferredStep | None = None
        # Of each module that can be watched, its hooks and the key of the one that
        # watches it. Hot: looked up once.
        self._hooks: dict[nn.Module, tuple[Any, int]] = {}
        self._hook: Hook

    def reset(self) -> None:
        """Forget the buckets: they are cut anew, and nothing is on its way."""
        self._deferred_grads, self._hooks, self._kinds = [], {}, {}

    def watch(
        self, model: nn.Module, before_read: Callable[[nn.Module], None]
    ) -> list[Any]:
        """Have `before_read` called before modules run; returns the hooks' handles."""
        self._hook = Hook(lambda module, _: before_read(module))
        handles = []
        for module in model.modules():
            handle = module.register_forward_pre_hook(self._hook, prepend=True)
            handles.append(handle)
            self._hooks[module] = module._forward_pre_hooks, handle.id
        return handles

    def promise(self) -> None:
        """Put a `DeferredGrad` in the place of every gradient."""
        if not self._deferred_grads:  # by now the buckets are final
            self._deferred_grads = [
                (slot, slot.param, DeferredGrad.of(slot.param, self._unscale))
                for slot in self._placement.slots
            ]
        for _, p, deferred in self._deferred_grads:
            deferred.zeroed = False
            p.grad = deferred

    def withdraw(self, dropped: bool) -> None:
        """Take them back; RuntimeError if one is `dropped` that was not zeroed."""
        for _, p, deferred in self._deferred_grads:
            # Not only where a mean replaces it: no rank may have used this parameter.
            if p.grad is deferred:
                if dropped and not deferred.zeroed:
                    raise RuntimeError(
                        "two backward passes before one step(): under a deferred "
                        "schedule all but the last belong inside sync.no_sync(); "
                        "or call sync.gather_gradients() between them"
                    )
                p.grad = None

    def note(self, optimizer: Optimizer) -> None:
        """Note what step() would do now, and to which parameters."""
        self._step = DeferredStep(optimizer)
        for slot, p, deferred in self._deferred_grads:
            if p.grad is deferred:
                slot.wanted = not deferred.zeroed
                p.grad = None
            else:
                slot.wanted = False

    def expect(self) -> list[GradientBucket]:
        """All is due now: watch the parameters, and the modules that read them.

        Returns the buckets that cannot be watched, to be updated at once.
        """
        if not self._kinds:
            self._kinds = {b: self._kinds_of(b) for b in self._placement.buckets}
        now = self._unwatchable()
        for bucket in self._placement.buckets:
            for p, _, due in self._kinds[bucket]:
                p.__class__ = due
        # Under the hook's old key: to register it anew costs more than to leave it on.
        for module in self._placement.reads:
            entry = self._hooks.get(module)
            if entry is not None:  # not if the user added the module since
                hooks, key = entry
                hooks[key] = self._hook
                if len(hooks) > 1:
                    hooks.move_to_end(key, last=False)
        return now

    def _kinds_of(
        self, bucket: GradientBucket
    ) -> list[tuple[nn.Parameter, Kind, Kind]]:
        params = [slot.param for slot in bucket.slots]
        return [(p, type(p), due) for p in params if (due := self._due.kind(p))]

    def _unwatchable(self) -> list[GradientBucket]:
        """Buckets of parameters that are read past their class, see [Note: aliases]."""
        places = self._placement.places
        found = self._aliases.find() + self._due.rigid(places)
        if found and not self._warned:
            self._warned = True
            warnings.warn(
                f"another tensor shares the memory of {places[found[0]].slot.name} (a "
                "kept .data or .detach(), a flat view, another parameter), so its "
                "deferred update is carried out at step(), and the exchange of its "
                "bucket does not hide in the next forward: let go of that tensor "
                "before step(), or keep a copy",
                stacklevel=2,
            )
        buckets = {places[p].bucket for p in found}
        return [b for b in reversed(self._placement.buckets) if b in buckets]

    def apply(self, bucket: GradientBucket) -> None:
        """Carry out the noted step for the parameters of a bucket."""
        assert self._step is not None
        for p, plain, _ in self._kinds[bucket]:
            p.__class__ = plain
        updates = [(s.param, mean) for s, mean in bucket.delivered() if s.wanted]
        device = bucket.payload.flat.device.type
        # As at step(): outside the forward's inference mode and autocast.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            aside = [p.grad for p, _ in updates]  # no_sync() may have begun anew
            for p, mean in updates:
                p.grad = mean
            self._step.apply([p for p, _ in updates], not bucket.momentum_applied)
            for (p, _), grad in zip(updates, aside, strict=True):
                p.grad = grad
        # Nothing that was up to date once this bucket was is watched any longer.
        reads = self._placement.reads
        self.rest(
            module
            for module in self._placement.readers[bucket]
            if len(reads[module]) == 1
            or not any(other.stage is Stage.DUE for other in reads[module])
        )

    def rest(self, modules: Iterable[nn.Module]) -> None:
        """Watch these modules no longer, see [Note: watch]."""
        for module in modules:
            entry = self._hooks.get(module)
            if entry is not None:  # not if the module is a copy
                entry[0].pop(entry[1], None)


class DeferredGrad(Tensor):
    """Shape, dtype and device of a gradient that is not here yet; no values.

    A GradScaler can unscale it, through the owners' parts, and it can be zeroed. All
    else is refused by name, instead of letting a norm of nothing be computed.
    """

    zeroed: bool
    unscale: Unscale

    @staticmethod
    def of(param: Tensor, unscale: Unscale) -> DeferredGrad:
        """What stands for `param`'s gradient.

        `unscale` is called once, with any of them, when a GradScaler unscales all
        gradients of a dtype and device.
        """
        deferred: DeferredGrad = Tensor._make_wrapper_subclass(
            DeferredGrad, param.size(), dtype=param.dtype, device=param.device
        )
        deferred.zeroed, deferred.unscale = False, unscale
        return deferred

    # The stubs lose the keyword's name, and declare the dispatcher without `cls`.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredGrad(shape={tuple(self.shape)}, dtype={self.dtype})"

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
        if isinstance(tensor, DeferredGrad):
            tensor.zeroed = True
        else:
            tensor.zero_()
    return target if isinstance(target, Tensor) else None


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    deferred = [grad for grad in grads if isinstance(grad, DeferredGrad)]
    here = [grad for grad in grads if not isinstance(grad, DeferredGrad)]
    if here:
        torch._amp_foreach_non_finite_check_and_unscale_(here, found_inf, inv_scale)
    deferred[0].unscale(deferred[0], found_inf, inv_scale)


class DeferredStep:
    """What `optimizer.step()` would do now, to be applied to some parameters at a time.

    Hyper-parameters and attributes are those of the moment of construction: LR
    schedulers run between `step()` and the update, and `step()` may count steps. The
    optimizer's state is shared, not copied. An optimizer that this one holds is seen
    in the same way. This is right for every optimizer that treats parameters one by
    one (all of torch.optim but LBFGS).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind = type(optimizer)
        self._attributes = dict(vars(optimizer))
        self._attributes.pop("step", None)  # LR schedulers bind it to the original
        for name, value in self._attributes.items():
            if isinstance(value, Optimizer):
                self._attributes[name] = DeferredStep(value)
        # Tensors are cloned: schedulers change them in place.
        self._groups: list[dict[str, Any]] = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            for group in optimizer.param_groups
        ]
        self._group_of = {
            id(p): i for i, group in enumerate(self._groups) for p in group["params"]
        }

    def apply(self, params: Sequence[Tensor], momentum: bool) -> None:
        """Step for exactly these parameters, from their `.grad`.

        The step has no `momentum` where that is in the gradients already.
        """
        own_step(self._kind)(self._view(params, momentum))

    def _view(self, params: Sequence[Tensor], momentum: bool) -> Optimizer:
        """The optimizer, as it was, of these parameters; it shares the state."""
        view: Optimizer = object.__new__(self._kind)
        view.__dict__ = {
            name: value._view(params, momentum)
            if isinstance(value, DeferredStep)
            else value
            for name, value in self._attributes.items()
        }
        view._optimizer_step_pre_hooks = OrderedDict()
        view._optimizer_step_post_hooks = OrderedDict()
        own: dict[int, list[Tensor]] = {}
        for p in params:
            if id(p) in self._group_of:
                own.setdefault(self._group_of[id(p)], []).append(p)
        view.param_groups = [
            {**group, **({} if momentum else without(group)), "params": members}
            for group, members in ((self._groups[i], own[i]) for i in sorted(own))
        ]
        return view


def own_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """What step() does, without torch's global hooks: they run once a step()."""
    step: Callable[[Optimizer], Any] = kind.step
    hooked = getattr(step, "hooked", False)
    return step.__wrapped__ if hooked else step  # type: ignore[attr-defined]


def closes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether step() was given a closure; `args` of a hook begin with the optimizer."""
    return any(a is not None for a in (*args[1:], kwargs.get("closure")))
