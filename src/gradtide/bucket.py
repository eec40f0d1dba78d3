"""What travels as one: a flat buffer, its parts, and the algorithm's memory of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from gradtide.ops import Flow, Group


@dataclass
class Payload:
    """A collective's view of a bucket.

    `flat` (1-D) holds what to average, and afterwards what was not delivered; `parts`
    is the same memory in the shapes that it came from; `state` belongs to the
    algorithm.
    """

    flat: Tensor
    parts: Sequence[Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)


class Collective(Protocol):
    """An averaging algorithm: a frozen dataclass of hyper-parameters.

    The contract is the conservation law, over all ranks r
    (`gradtide.testing.check_law`):

        sum_r before_r == P * mean + sum_r after_r

    where `mean` is the flow's result, bit-identical on all ranks, and `after_r` is what
    it left in `load.flat`. A flow may return `load.flat` itself: the memory has then
    been handed out as the mean, and nothing was left behind.
    """

    def reduce(self, load: Payload, group: Group) -> Flow: ...


@dataclass(eq=False)
class Bucket:
    """A payload with a name, an algorithm and an owner.

    `deliver` receives the mean (1-D, as long as the flat buffer) on the thread that
    finishes the bucket. With `hold` the flow waits at its `Cut` until it is released.
    """

    name: str
    load: Payload
    collective: Collective
    deliver: Callable[[Tensor], None]
    hold: bool = False
