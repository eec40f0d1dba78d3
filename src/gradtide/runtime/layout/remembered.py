"""What an algorithm remembers of a bucket, and what it can go on with in another one.

It is the `state` of the bucket's payload: numbers of steps; what has an entry for every
element (a velocity); and what is about the bucket as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradtide.core.payload import Payload
from gradtide.runtime.layout.slots import Slot

State: TypeAlias = dict[str, Tensor]


def counts(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The numbers of steps that an algorithm remembers."""
    found = {key: _count(value) for key, value in state.items()}
    return {key: count for key, count in found.items() if count is not None}


def count_on(state: State, counted: Mapping[str, int]) -> None:
    """Have an algorithm count on from these numbers."""
    state |= {key: _tensor(count) for key, count in counted.items()}


def carried(
    slots: Sequence[Slot], flat: Tensor, before: Sequence[tuple[Slot, Payload]]
) -> State:
    """What the algorithm of a new bucket can go on with.

    `before` says where each of its slots was, and in which bucket's payload. What stays
    are the numbers of steps, if those of all the old buckets are equal, and what has an
    entry for every element. Thresholds, boundaries and factors are about a bucket as a
    whole, and are learnt anew, as in a first step.
    """
    olds = list({id(payload): payload for _, payload in before}.values())
    kept: State = {}
    for key in {key: None for old in olds for key in old.state}:
        found = [(old, old.state.get(key)) for old in olds]
        numbers = {_count(value) for _, value in found}
        if None not in numbers:
            if len(numbers) == 1:
                kept[key] = _tensor(numbers.pop())
        elif all(_is_like(value, old.flat) for old, value in found):
            kept[key] = torch.zeros_like(flat)
            for slot, (place, old) in zip(slots, before, strict=True):
                value = old.state.get(key)
                if value is not None:
                    slot.of(kept[key]).copy_(place.of(value))
    return kept


def _count(value: Tensor | None) -> int | None:
    """The number of steps that an algorithm remembers by a value, if it does."""
    if value is None or value.dtype != torch.int64 or value.dim():
        return None
    return int(value)


def _tensor(count: int | None) -> Tensor:
    return torch.tensor(count, dtype=torch.int64, device="cpu")


def _is_like(value: Tensor | None, flat: Tensor) -> bool:
    return value is None or (value.shape, value.dtype) == (flat.shape, flat.dtype)
