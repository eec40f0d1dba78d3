"""What a fusion is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Cost: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class Trace:
    """What a fusion knows: a model's tensors in the order their gradients get ready.

    Seconds of the forward and of the backward are those that end when the tensor has
    been read for the first time, or when its gradient is ready; None: not measured.
    """

    nbytes: Sequence[int]
    forward: Sequence[float] | None = None
    backward: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            seconds = getattr(self, name)
            if seconds is not None and len(seconds) != len(self.nbytes):
                raise ValueError(
                    f"Trace: {len(seconds)} {name} times for {len(self.nbytes)} "
                    "tensors: give one for each"
                )


class Fusion(Protocol):
    """Cuts the tensors of a trace into consecutive slices that cover all of them.

    `cost` maps the bytes of one bucket to the seconds of its exchange.
    """

    def __call__(self, trace: Trace, cost: Cost) -> list[slice]: ...
