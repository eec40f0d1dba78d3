"""Where training would wait for a device: what is asked of tensors, on a CPU.

There nothing is on a device, so what would be is told by where tensors come from: made
with device="cpu", or from those alone, they are the host's; all others would be on the
device of the parameters. Code that asks is told that they are on one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import ismethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gradtide.runtime.deferred.grads import DeferredGrad
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.training import Training
from tests.test_layers import ROOT

HOSTS = "transport", "core/kernels", "core/devices"  # whose tensors are on the host
WRAPPERS = {torch._tensor.__file__, torch.functional.__file__}  # of what is asked
ASKS = {"item", "tolist", "numpy", "cpu", "equal", "allclose", "nonzero", "unique"}
ASKS |= {"masked_select", "is_nonzero", "__float__", "__int__", "__bool__", "__index__"}
TOLD = {Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}  # type: ignore[attr-defined]


class DeviceContext(TorchFunctionMode):  # by this name gradtide knows a default device
    """Notes where the host would wait, as `file:function: what is called`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._hosts: dict[int, Tensor] = {}  # kept, or others would get their memory

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in TOLD:
            told = TOLD[func]
            return not told if self._is_hosts(args[0]) else told
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name, hosts = getattr(func, "__name__", ""), [*map(self._is_hosts, tensors)]
        if self._waits(name, args, kwargs, hosts) and (place := _place()):
            self.found.append(f"{place}: {name}")
        result = func(*args, **kwargs)
        if name == "cpu" and not all(hosts):
            self._keep(result := result.clone())
        literal = kwargs.get("device") == "cpu" and isinstance(kwargs["device"], str)
        if literal or (tensors and all(hosts)):
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    self._keep(made)
        return result

    def _waits(self, name: str, args: Any, kwargs: Any, hosts: list[bool]) -> bool:
        there = not all(hosts)
        device = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else "")
        moved = isinstance(device, torch.device)
        if name == "copy_":
            return len(set(hosts)) == 2
        if name == "to":
            return (there and device == "cpu" and not moved) or (moved and not there)
        if name in ("tensor", "as_tensor"):
            return moved or (there and device == "cpu")
        if name == "__getitem__":
            index = tree_leaves(args[1])
            return there and any(getattr(i, "dtype", 0) is torch.bool for i in index)
        return there and (name in ASKS or name == "new_tensor")

    def _is_hosts(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return type(tensor) is Tensor and _memory(tensor) in self._hosts

    def _keep(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            if type(tensor) is Tensor:
                self._hosts[_memory(tensor)] = tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place() -> str:
    """The line's place if it is in gradtide, and in what a device may be behind."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in WRAPPERS:
        assert frame.f_back is not None
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return ""
    name = str(path.relative_to(ROOT).with_suffix(""))
    return "" if name.startswith(HOSTS) else f"{name}:{frame.f_code.co_name}"


# Where autograd, dispatch and new threads begin with no mode on.
ENTRIES = (
    (threading.Thread, "run"),
    (DeferredGrad, "__torch_dispatch__"),
    (GradientBucket, "copy_in_one"),
    *((Training, name) for name in ("expect", "begin", "full", "_end")),
)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Note where the host would wait, in this thread and those that begin in it."""
    mode = DeviceContext()

    def entered(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            on = torch._C._len_torch_function_stack()
            with nullcontext() if on else mode:
                return call(*args)

        return run

    with pytest.MonkeyPatch.context() as patch, mode:
        for owner, name in ENTRIES:
            bound = getattr(owner, name)
            own: Any = entered(bound)
            patch.setattr(owner, name, staticmethod(own) if ismethod(bound) else own)
        yield mode.found
