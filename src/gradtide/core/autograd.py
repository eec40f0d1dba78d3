"""Hooks, and what they must know of torch's autograd beyond its documented surface."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from gradtide.core.compilation import leave_out, untraced


class Hook:
    """A hook on a module that no copy of the module has: there it does nothing.

    Where torch.compile traces through the module, the hook vanishes, see
    `core.compilation`. One that is `needed` in every forward breaks the graph instead,
    and torch tells that text as the reason; but what is exported is no forward.
    """

    def __init__(self, call: Callable[..., object], needed: str | None = None) -> None:
        leave_out(type(self).__call__)
        self._call = untraced(call, reason=needed)
        self._vanishes = needed is None

    def __call__(self, *args: Any) -> Any:
        vanishes = self._vanishes or torch.compiler.is_exporting()
        if vanishes and torch.compiler.is_dynamo_compiling():
            return None
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes anything, returns None, and can be loaded where gradtide is not there.
        return getattr, (nullcontext(), "__exit__")


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


def after_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the backward that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(untraced(call))


def in_backward() -> bool:
    """Whether this runs inside a backward: a hook, or activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_traced() -> bool:
    """Whether what runs here is recorded as a program, which is no step of training."""
    kinds = torch._C._TorchDispatchModeKey
    modes = (torch._C._get_dispatch_mode(kind) for kind in (kinds.PROXY, kinds.FAKE))
    return (
        torch._C._is_tracing()
        or torch.compiler.is_compiling()
        or any(mode is not None for mode in modes)
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
