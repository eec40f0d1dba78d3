"""Compiled kernels for wires, by kinds of devices: numba's and Triton's do the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradtide.core.kernels import TRITON, Kernels

SAMPLE = 512  # values that are encoded to have kernels ready


class Tool(NamedTuple):
    """A module of kernels, and what it is for."""

    kernels: Kernels
    functions: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    call: Callable[..., None]  # a function of it, with what that is given


class Coded(Protocol):
    """What is asked of a codec here."""

    @property
    def compiled(self) -> tuple[str, ...]: ...
    def nbytes(self, count: int) -> int: ...
    def encode(self, values: Tensor, message: Tensor) -> None: ...
    def decode(self, message: Tensor, out: Tensor) -> None: ...
    def add(self, messages: Tensor, out: Tensor) -> None: ...


def compiled(what: str, x: Tensor) -> Callable[..., None] | None:
    """The function `what` for such tensors, if there is a compiled one."""
    tool = TOOLS.get(x.device.type)
    if tool is None or what not in tool.functions or x.dtype not in tool.dtypes:
        return None
    module = tool.kernels.module()
    return None if module is None else partial(tool.call, getattr(module, what))


def prepare(codec: Coded, dtype: torch.dtype, device: torch.device) -> None:
    """Have ready what encodes and adds up such tensors."""
    tool = TOOLS.get(device.type)
    if tool is None or not set(codec.compiled) <= set(tool.functions):
        return
    if dtype not in tool.dtypes:
        dtype = torch.promote_types(dtype, torch.float32)  # in which sums are taken
    values = torch.zeros(SAMPLE, dtype=dtype, device=device)
    message = torch.zeros(codec.nbytes(SAMPLE), dtype=torch.uint8, device=device)

    def all_of_them(_: Any) -> None:
        for x in (values, values[1:]):  # Triton has kernels for what is aligned
            own = message[: codec.nbytes(len(x))]
            codec.encode(x, own)
            codec.decode(own, x)
            codec.add(own[None], x)

    tool.kernels.prepare((codec, dtype), all_of_them)


def _fast() -> Any:
    import gradtide.wire.fast as fast

    return fast


def _triton() -> Any:
    import gradtide.wire.triton_kernels as triton_kernels

    return triton_kernels


def _on_arrays(function: Callable[..., None], *given: Any) -> None:
    function(*(x.numpy() if isinstance(x, Tensor) else x for x in given))


def _on_tensors(function: Callable[..., None], *given: Any) -> None:
    function(*given)


TOOLS = {
    "cpu": Tool(
        Kernels(
            _fast,
            "encoding of narrow wires",
            "values are encoded by torch, which takes some twenty times as long",
        ),
        ("encode", "add"),
        (torch.float32, torch.float64),
        _on_arrays,
    ),
    "cuda": Tool(
        Kernels(
            _triton,
            "encoding of values",
            "values are encoded by torch, which takes some twenty times as long",
            TRITON,
        ),
        ("encode", "add", "cast"),
        (torch.float32, torch.float64, torch.bfloat16, torch.float16),
        _on_tensors,
    ),
}
