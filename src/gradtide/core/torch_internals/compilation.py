"""What gradtide must know of torch.compile.

[Note: compiled] Where torch.compile traces through a module, the module's hooks are
traced as well, and would become part of the graph, or break it. Those of gradtide
vanish there (`autograd.Hook`). At the border of a compiled region, which is a module
that was compiled by `module.compile()` or is called by code that was not, hooks are
called as always, outside the graph. So what compiled code reads is made ready at its
border.

Which modules those are can be seen when they run, until something is compiled anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

Function = Callable[..., Any]


def leave_out(function: Function) -> None:
    """Have torch.compile begin no graph at a function, but trace through it in one.

    It may begin one at what the function calls, unless that is `untraced`: a call of
    that takes 1 us longer.
    """
    from torch._dynamo.eval_frame import skip_code  # optimizers have imported it

    skip_code(function.__code__)


def untraced(function: Function, reason: str | None = None) -> Function:
    """A function that torch.compile leaves alone, with all that it calls.

    Where it would be traced the graph is broken, for the `reason` that torch tells.
    """
    disable: Any = torch.compiler.disable
    apart: Function = disable(function, reason=reason)
    return apart


def compiled_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost module that was compiled around a parameter, by its name."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            for name, _ in module.named_parameters(path):
                found.setdefault(name, module)
    return found


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript runs a module, which takes no hooks on forwards then."""
    return isinstance(module, torch.jit.ScriptModule)


class Compilations:
    """Calls a method before torch.compile begins to trace anything, in any graph.

    Nothing is kept alive by it. torch._dynamo.reset() forgets it, so `watch` is called
    again and again; and torch.export calls that just before it traces, and tells nobody
    else, so the method is called then, too.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = weakref.WeakMethod(before)
        self._known: weakref.finalize[Any, Any] | None = None  # torch has the callback

    def watch(self) -> None:
        """Look from now on."""
        if self._known is None or not self._known.alive:
            callback = partial(self._begins)  # of which nobody else has a reference
            _callbacks().append(callback)
            self._known = weakref.finalize(callback, self._call)
            self._known.atexit = False

    def remove(self) -> None:
        """Look no longer."""
        found = None if self._known is None else self._known.detach()
        if found is not None:
            _callbacks().remove(found[0])

    def _begins(self, args: Any) -> None:
        if args.callback_trigger.name == "DYNAMO":
            self._call()

    def _call(self) -> None:
        before = self._before()
        if before is not None:
            with uncompiled():
                before()


def _callbacks() -> list[Any]:
    from torch._dynamo.callback import callback_handler

    known: list[Any] = callback_handler.start_callbacks
    return known


@contextmanager
def uncompiled() -> Iterator[None]:
    """Have code run as it does without torch.compile.

    Optimizers ask whether they are compiled, and compute with other numbers then.
    """
    compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = compiling
