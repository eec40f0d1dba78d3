"""Hooks, and what they must know of torch's autograd."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from gradtide.core.torch_internals.compilation import is_scripted, leave_out, untraced


class Hook:
    """A hook on a module that no copy of the module has: there it does nothing.

    Where torch.compile traces through the module, the hook vanishes, see the file
    `compilation`. One that is `needed` in every forward breaks the graph instead, and
    torch tells that text as the reason; but what is exported is no forward.
    torch.jit.script compiles a module's hooks, but not those, see `_scriptable`.
    """

    def __init__(self, call: Callable[..., object], needed: str | None = None) -> None:
        leave_out(type(self).__call__)
        nn.Module.__prepare_scriptable__ = _scriptable  # type: ignore[attr-defined]
        self._call = untraced(call, reason=needed)
        self._vanishes = needed is None

    def __call__(self, *args: Any) -> Any:
        # torch.compiler.is_exporting() is true of all that Dynamo of torch 2.11 traces.
        vanishes = self._vanishes or torch.compiler._is_exporting_flag
        if vanishes and torch.compiler.is_dynamo_compiling():
            return None
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes anything, returns None, and can be loaded where gradtide is not there.
        return getattr, (nullcontext(), "__exit__")


def before_loading(module: nn.Module, hook: Hook) -> Any:
    """Have it called before the module's load_state_dict(); returns its handle.

    torch's public method has the hook hold the module, which a copy that the module's
    class makes in its own way (`__reduce__`) holds wrongly, and a copy of that breaks.
    """
    return module._register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]


def _is_ours(hook: Any) -> bool:
    """Whether it is a `Hook`, or what a copy has in its place."""
    known = getattr(hook, "__func__", None) is nullcontext.__exit__
    return known or isinstance(hook, Hook)


def _scriptable(module: nn.Module) -> nn.Module:
    """What torch.jit.script, which asks every module so, reads in a module's place.

    It has the module's own parameters and no `Hook`, and what state_dict() would bring
    up to date is up to date. torch writes what it gets into the module above: so that
    this stays as it is, another one stands for each that has a `Hook` anywhere below.
    """
    for hook in module._state_dict_pre_hooks.values():
        if _is_ours(hook):
            hook(module, "", False)
    names = ("_forward_hooks", "_forward_pre_hooks")
    hooks = (getattr(each, name) for each in module.modules() for name in names)
    if is_scripted(module) or not any(_is_ours(h) for d in hooks for h in d.values()):
        return module
    plain = object.__new__(type(module))
    plain.__dict__.update(module.__dict__, _modules=module._modules.copy())
    for name in names:
        kept = getattr(module, name).items()
        plain.__dict__[name] = OrderedDict((k, h) for k, h in kept if not _is_ours(h))
    return plain


def before_backward(output: Any, call: Callable[[], object]) -> None:
    """Have `call` called when a backward begins at tensors of a model's output.

    It is called once for each of them, before any gradient of the model is produced.
    """
    if not torch.is_grad_enabled():
        return

    def hook(_: Tensor) -> None:
        call()

    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(untraced(hook))  # type: ignore[no-untyped-call]


class _GradientHooks(OrderedDict[int, Callable[[Tensor], None]]):
    """The hooks of a parameter's gradient, of which one stays behind all others.

    torch calls what is in the dictionary when a gradient is there, in its order.
    """

    last: int | None = None  # the key of the one that stays behind

    def __setitem__(self, key: int, hook: Callable[[Tensor], None]) -> None:
        super().__setitem__(key, hook)
        if self.last is not None and self.last != key and self.last in self:
            super().__setitem__(self.last, self.pop(self.last))


def after_accumulation(p: Tensor, hook: Callable[[Any], None]) -> Any:
    """Have `hook` called when a parameter's gradient is complete, behind all others.

    Also behind those that are registered later: as under DistributedDataParallel, they
    see the rank's own gradient, and what they make of it is exchanged. Returns a
    handle that has `remove()`.
    """
    before = p._post_accumulate_grad_hooks
    if not isinstance(before, _GradientHooks):
        p._post_accumulate_grad_hooks = _GradientHooks()
        if before:  # in the dictionary from which their handles remove them
            p._post_accumulate_grad_hooks[-1] = _each_of(before)
    handle = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks: Any = p._post_accumulate_grad_hooks
    hooks.last = handle.id
    return handle


def _each_of(hooks: dict[int, Callable[[Tensor], None]]) -> Callable[[Tensor], None]:
    def call(p: Tensor) -> None:
        for hook in list(hooks.values()):
            hook(p)

    return call


def rehook(p: Tensor) -> None:
    """Have a parameter's hooks called again: torch.utils.swap_tensors drops them.

    They stay in its dictionary, and autograd no longer knows that.
    """
    p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks


def identity(p: Tensor) -> tuple[int, int]:
    """Numbers of what autograd knows a tensor by: another one, or fewer writes to it,
    where the tensor was swapped.
    """
    return p._cdata, p._version


def after_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the backward that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(untraced(call))


def in_backward() -> bool:
    """Whether this runs inside a backward: a hook, or activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_traced() -> bool:
    """Whether what runs here is recorded as a program, or transformed by torch.func.

    It is no step of training then.
    """
    kinds = torch._C._TorchDispatchModeKey
    modes = (torch._C._get_dispatch_mode(kind) for kind in (kinds.PROXY, kinds.FAKE))
    return (
        torch._C._is_tracing()
        or torch.compiler.is_compiling()
        or any(mode is not None for mode in modes)
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_watched() -> bool:
    """Whether anything sees, or changes, what operations this thread runs."""
    if torch._C._len_torch_function_stack():
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        kinds = {type(mode).__name__ for mode in stack}
        if kinds - {"DeviceContext"}:  # of a default device
            return True
    return (
        torch._C._is_tracing()
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def apart(call: Callable[[], None]) -> None:
    """Call it in a thread of its own, where no mode is on; raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="gradtide apart", daemon=True)
    thread.start()
    thread.join()
    for error in raised:
        raise error
