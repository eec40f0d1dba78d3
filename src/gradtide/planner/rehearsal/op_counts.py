"""What the processor does between two requests, counted while a flow runs.

Every operation on tensors is one of five kinds: it looks at memory in a row, it touches
entries here and there, or close to each other, it puts them in order, or it does
nothing but look at the same memory in another way. What each kind takes on a device is
for `device` to know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gradtide.core.torch_internals import TorchDispatchMode

# By the names that operations have in ATen, and where the number of entries is found.
_ORDERING = {"sort", "_unique2", "unique_dim", "topk", "kthvalue"}
_BY_INDEX = {"index_fill_", "index_copy_", "index_add_", "index_select", "gather"}
_TOUCHING = {*_BY_INDEX, "index", "index_put_", "_index_put_impl_", "searchsorted"}
_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_NOTHING |= {"_local_scalar_dense", "scalar_tensor", "item", "set_", "resize_"}
CLOSE = 4  # elements for an entry, or fewer: a cache line holds several of them


class Work(NamedTuple):
    """What the processor does before a request: counts of elements, and of calls."""

    scanned: float = 0.0  # by the selector
    moved: float = 0.0  # copied, cast, added or compared, in a row
    entries: float = 0.0  # read or written here and there
    ordered: float = 0.0
    nearby: float = 0.0  # entries that are close to each other
    calls: float = 0.0

    def times(self, factor: float) -> Work:
        """So many times the elements, in as many calls."""
        return Work(*(factor * n for n in self))._replace(calls=self.calls)

    def beyond(self, before: Work, weight: float) -> Work:
        """`weight` times the difference to `before` more of everything."""
        pairs = zip(before, self, strict=True)
        return Work(*(max(b + weight * (b - a), 0.0) for a, b in pairs))


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; `read` returns what has come together since."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in _NOTHING:
            return answer
        if name in _TOUCHING:
            count = _touched(name, args, answer)
            kind = "nearby" if _numel(args[0]) <= CLOSE * count else "entries"
        elif name in _ORDERING:
            kind, count = "ordered", args[0].numel()
        else:
            results = answer if isinstance(answer, list | tuple) else (answer,)
            kind, count = "moved", max(map(_numel, (*args, *results)), default=0)
        self._found[kind] += count
        self._found["calls"] += 1
        return answer

    def read(self, ranks: int = 1) -> Work:
        """Means over so many ranks."""
        found = {kind: count / ranks for kind, count in self._found.items()}
        self._found.clear()
        return Work(**found)


def _touched(name: str, args: tuple[Any, ...], answer: Any) -> int:
    if name in _BY_INDEX:
        return int(args[2].numel())  # (tensor, dimension, indices)
    if name in ("index_put_", "_index_put_impl_"):
        return max(_numel(i) for i in args[1] if i is not None)
    return int(answer.numel())


def _numel(value: Any) -> int:
    """Of a tensor, or of all tensors that are put together."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, list | tuple):
        return sum(map(_numel, value))
    return 0
