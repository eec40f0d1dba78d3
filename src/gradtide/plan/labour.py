"""What the processor does between two requests, counted while a flow runs.

Every operation on tensors is one of five kinds: it looks at memory in a row, it touches
entries here and there, or close to each other, it puts them in order, or it does
nothing but look at the same memory in another way. What each kind takes on a device is
for `device` to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """The sum with `times` the other; nothing is ever less than nothing."""
        both = zip(self, other, strict=True)
        return Work(*(max(mine + times * its, 0.0) for mine, its in both))

    def times(self, factor: float) -> Work:
        """So many times the elements, in as many calls."""
        return Work(*(factor * n for n in self))._replace(calls=self.calls)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; `read` returns what has come together since."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = [0] * 5

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func.is_view:
            return answer
        name = func.overloadpacket.__name__
        if name not in _NOTHING:
            kind = 1 if name in _TOUCHING else 2 if name in _ORDERING else 0
            count = _elements(name, kind, args, answer)
            if kind == 1 and _numel(args[0]) <= CLOSE * count:
                kind = 3
            self._found[kind] += count
            self._found[4] += 1
        return answer

    def read(self, ranks: int = 1) -> Work:
        """Means over so many ranks."""
        found, self._found = self._found, [0] * 5
        return Work(0.0, *(n / ranks for n in found))


class Idle:
    """In the place of a counter: finds nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def read(self, ranks: int = 1) -> Work:
        return Work()


def _elements(name: str, kind: int, args: tuple[Any, ...], answer: Any) -> int:
    if kind == 1:
        if name in _BY_INDEX:
            return int(args[2].numel())  # (tensor, dimension, indices)
        if name in ("index_put_", "_index_put_impl_"):
            return max(_numel(i) for i in args[1] if i is not None)
        return int(answer.numel())
    if kind == 2:
        return int(args[0].numel())
    results = answer if isinstance(answer, list | tuple) else (answer,)
    return max(map(_numel, (*args, *results)), default=0)


def _numel(value: Any) -> int:
    """Of a tensor, or of all tensors that are put together."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, list | tuple):
        return sum(map(_numel, value))
    return 0
