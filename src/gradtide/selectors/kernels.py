"""Passes over a bucket that selectors make, on every device.

Selectors know nothing of devices: kernels for another one are `_under_way`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtide.core.kernels import TRITON, Kernels
from gradtide.selectors.indices import Scan, everything, index_dtype

CHUNK = 1 << 16  # elements whose temporaries stay in a core's cache
BITS: dict[torch.dtype, Any] = {torch.float32: np.int32, torch.float64: np.int64}


def _load() -> Any:
    import gradtide.selectors.fast as fast

    return fast


KERNELS = Kernels(
    _load,
    "selection of entries",
    "entries are selected by numpy, which takes three to four times as long",
)


def _load_triton() -> Any:
    import gradtide.selectors.triton_kernels as triton_kernels

    return triton_kernels


GPU = Kernels(
    _load_triton,
    "selection of entries",
    "entries are selected by torch, which takes several passes",
    TRITON,
)


def largest(x: Tensor, k: int, found: Tensor) -> Tensor:
    """The `k` of the indices `found` (sorted) where |x| is largest; all, if not more.

    NaN is largest, then infinity.
    """
    if len(found) <= k:
        return found
    return top(found, x.index_select(0, found).abs(), k)


def top(found: Tensor, sizes: Tensor, k: int) -> Tensor:
    """Those of the indices `found` (sorted) whose sizes are the `k` largest, sorted."""
    best = torch.topk(sizes, k, sorted=False).indices
    if found.device.type != "cpu":
        return found.index_select(0, best).sort().values  # a mask would be waited for
    # As a mask, which keeps the order: a sort takes longer than all the rest.
    return found[torch.zeros_like(sizes, dtype=torch.bool).index_fill_(0, best, True)]


def above(x: Tensor, threshold: float, limit: int) -> Tensor:
    """Where |x| is not at most `threshold`, so that NaN counts as large.

    The first `limit` sorted indices (1-D, int32) into `x` (1-D, contiguous); a negative
    threshold finds everything. One pass over memory. On a GPU the host waits once, and
    what is found lies in memory for `limit` of them.
    """
    found = _under_way(x, threshold, limit)
    if found is None:
        return _above(x, threshold, limit)
    return found.indices[: int(found.number)]


def scan(x: Tensor, threshold: float, limit: int) -> Scan:
    """`above` in two halves, so that several may be under way at once."""
    seen = _under_way(x, threshold, limit)
    if seen is None:
        found = _above(x, threshold, limit)
        return Scan(x.new_full((), len(found), dtype=torch.int64), found)
    return seen


def entries(x: Tensor, threshold: float, limit: int) -> tuple[Tensor, Tensor]:
    """`above`, and the values there: of the same pass where it is a compiled one."""
    compiled = x.device.type == "cpu" and x.dtype in BITS and x.numel() < 1 << 31
    if compiled and _compact() is not None:
        values = torch.empty(min(limit, x.numel()), dtype=x.dtype, device="cpu")
        found = _scan(x, threshold, limit, values)
        return found, values[: len(found)]
    seen = _under_way(x, threshold, limit, with_values=True)
    if seen is None or seen.values is None:
        found = _above(x, threshold, limit)
        return found, x.index_select(0, found)
    number = int(seen.number)
    return seen.indices[:number], seen.values[:number]


def _under_way(
    x: Tensor, threshold: float, limit: int, with_values: bool = False
) -> Scan | None:
    """What Triton looks for; None where there is no GPU, or Triton does not work."""
    module = GPU.module() if x.device.type == "cuda" and x.numel() else None
    if module is None:
        return None
    found: Scan = module.scan(x, threshold, limit, with_values)
    return found


def _above(x: Tensor, threshold: float, limit: int) -> Tensor:
    if x.device.type != "cpu" or x.numel() >= 1 << 31:
        return _nonzero(x, threshold)[:limit].to(index_dtype(x.numel()))
    if x.dtype in BITS:
        return _scan(x, threshold, limit)
    return _in_chunks(lambda begin, end: _nonzero(x[begin:end], threshold), x, limit)


def _scan(
    x: Tensor, threshold: float, limit: int, values: Tensor | None = None
) -> Tensor:
    # without its sign, a float orders like the integer of the same bits, and NaN is
    # above infinity
    integer = BITS[x.dtype]
    bits = x.detach().numpy().view(integer)
    bound = (
        torch.tensor(threshold, dtype=x.dtype, device="cpu").numpy().view(integer)[()]
    )
    if threshold < 0:
        bound = integer(-1)
    compact = _compact()
    if compact is not None:
        out = torch.empty(min(limit, x.numel()), dtype=torch.int32, device="cpu")
        there = None if values is None else values.numpy().view(integer)
        return out[: compact(bits, bound, out.numpy(), there)]
    magnitude = np.empty(min(CHUNK, bits.size), integer)
    unsigned = np.iinfo(integer).max

    def large(begin: int, end: int) -> Tensor:
        part = magnitude[: end - begin]
        np.bitwise_and(bits[begin:end], unsigned, out=part)
        return torch.from_numpy(np.flatnonzero(part > bound))

    return _in_chunks(large, x, limit)


def _in_chunks(large: Callable[[int, int], Tensor], x: Tensor, limit: int) -> Tensor:
    found, count = [], 0
    for begin in range(0, x.numel(), CHUNK):
        where = large(begin, min(begin + CHUNK, x.numel()))
        found.append(where.add_(begin).to(torch.int32))
        count += len(where)
        if count >= limit:
            break
    return torch.cat(found)[:limit] if found else everything(x)


def _nonzero(x: Tensor, threshold: float) -> Tensor:
    return (x.abs() <= threshold).logical_not_().nonzero().squeeze(1)


def _compact() -> Callable[..., int] | None:
    module = KERNELS.module()
    return None if module is None else module.compact


def prepare(dtype: torch.dtype, device: torch.device) -> None:
    """Have ready what finds entries of such tensors."""
    if device.type == "cuda":
        wide = torch.promote_types(dtype, torch.float32)
        x = torch.zeros(33, dtype=wide, device=device)

        def all_of_them(_: Any) -> None:
            for part in (x[:32], x[1:], x):  # Triton has kernels for what is aligned
                above(part, -1.0, 32)
                entries(part, -1.0, 32)

        GPU.prepare(wide, all_of_them)
    if device.type != "cpu":
        return
    # Scores of half precision are single (Payload.selection_scores).
    integer = BITS.get(torch.promote_types(dtype, torch.float32))
    if integer is None:
        return
    bits, out = np.zeros(2, integer), np.empty(1, np.int32)

    def both(module: Any) -> None:
        module.compact(bits, integer(1), out, None)
        module.compact(bits, integer(1), out, bits.copy())

    KERNELS.prepare(integer, both)
