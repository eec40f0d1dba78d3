"""What collectives work on: a flat buffer, its parts, and an algorithm's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradtide.core.ops import Flow, Group


@dataclass
class Payload:
    """A collective's view of a bucket.

    `flat` (1-D) holds what to average, and afterwards the residual; `parts` is the same
    memory in the shapes that it came from; `state` belongs to the algorithm. `weigh`
    writes the selection scores, where they are not the entries themselves, into a
    tensor like `flat`, in single precision at least. A collective that has residuals
    works on entries alone, by these methods.

    `left` is what `flat` held before gradients were added to it, where somebody else
    than the collective put that there (see `runtime.layout.buckets`); it lasts until
    the next mean.
    """

    flat: Tensor
    parts: Sequence[Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)
    num_sent: int = 0  # entries taken out since the log was last read
    nonfinite: Tensor | float = 0.0  # NaN if anything that was checked is not finite
    weigh: Callable[[Tensor], None] | None = field(default=None, repr=False)
    shard: Payload | None = field(default=None, repr=False)  # of several levels
    left: Tensor | None = field(default=None, repr=False)
    _scores: Tensor | None = field(default=None, init=False, repr=False)
    _mean: Tensor | None = field(default=None, init=False, repr=False)
    _where: Tensor | None = field(default=None, init=False, repr=False)
    _version: int = field(default=-1, init=False, repr=False)
    _messages: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def selection_scores(self) -> Tensor:
        """What selection goes by (1-D, like `flat`): the largest magnitudes travel.

        With `weigh` all of them are computed each time that this is read.
        """
        if self.weigh is None:
            return self.flat
        if self._scores is None:
            # Products of small numbers: too small for half precision.
            dtype = torch.promote_types(self.flat.dtype, torch.float32)
            self._scores = torch.zeros_like(self.flat, dtype=dtype)
        self.weigh(self._scores)
        return self._scores

    def pop_entries(self, where: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Take the entries at `where` (1-D, unique) out of `flat`; returns them.

        Infinities and NaNs go too, and raise the alarm: also those that `dtype` makes,
        in which values have to be finite to travel.
        """
        # Slower by a factor of 2 to 5 as indexing with brackets.
        values = self.flat.index_select(0, where)
        self.flat.index_fill_(0, where.long(), 0)
        self.num_sent += len(values)
        self.check_finite(values.to(dtype or values.dtype))
        return values

    def check_finite(self, values: Tensor) -> None:
        """Raise the alarm if any of `values`, as they travel, is infinite or NaN.

        Nothing waits for the device: `nonfinite` is 0 or NaN once somebody reads it. It
        is read when every flow has asked for something: later would be a step late.
        """
        self.nonfinite = self.nonfinite + values.mul(0).sum(dtype=torch.float32)

    def check_all_finite(self, dtype: torch.dtype) -> None:
        """`check_finite` all of `flat`, as `dtype`: one reading pass."""
        if len(self.flat):
            self.check_finite(torch.stack(torch.aminmax(self.flat)).to(dtype))

    def add_residual(self, where: Tensor, values: Tensor) -> None:
        """Add `values` to the residuals of the entries at `where` (unique)."""
        self.flat.index_add_(0, where, values.to(self.flat.dtype))

    def sparse_mean(self, where: Tensor, values: Tensor) -> Tensor:
        """A mean (1-D, like `flat`) that is zero but for `values` at `where` (unique).

        The memory is the payload's, until the next call. Only what the last call wrote
        is cleared, unless somebody else wrote there since: a pass over memory, and more
        so fresh pages, would cost more than the exchange.
        """
        mean, last = self._mean, self._where
        if mean is None:
            mean = torch.zeros_like(self.flat)
        elif last is not None and mean._version == self._version:
            mean.index_fill_(0, last, 0)
        else:
            mean.zero_()
        where = where.long()
        mean.index_copy_(0, where, values.to(mean.dtype))
        self._mean, self._where, self._version = mean, where, mean._version
        return mean

    def mean_of_entries(self, where: Tensor, values: Tensor) -> Tensor:
        """The `sparse_mean` of entries that the ranks sent, a row for each rank.

        Those of a row are unique, and may be in others, too. Rows are added up one
        after the other, so that the sums are the same everywhere; no length depends on
        a number, so that nothing waits for a device.
        """
        everywhere = where.flatten()
        mean = self.sparse_mean(everywhere, values.new_zeros(values.numel()))
        for places, row in zip(where, values, strict=True):
            mean.index_add_(0, places, row.to(mean.dtype))
        found = mean.index_select(0, everywhere).div_(len(where))
        mean.index_copy_(0, everywhere.long(), found)
        self._version = mean._version
        return mean

    def entries_of(self, mean: Tensor) -> Tensor | None:
        """Where the last `sparse_mean` has entries, if `mean` is that."""
        own = self._mean
        is_own = own is not None and own.data_ptr() == mean.data_ptr()
        return self._where if is_own else None

    def mean_buffer(self) -> Tensor:
        """Memory for a mean that is written as a whole: the same as `sparse_mean`'s."""
        if self._mean is None:
            self._mean = torch.empty_like(self.flat)
        self._where = None
        return self._mean

    def message_buffer(self, rows: int, nbytes: int) -> Tensor:
        """Memory for messages (uint8, [rows, nbytes]), until the next call.

        It is the same in every step: fresh pages take as long as encoding.
        """
        memory = self._messages
        if memory is None or memory.numel() < rows * nbytes:
            memory = self.flat.new_empty(rows * nbytes, dtype=torch.uint8)
            self._messages = memory
        return memory[: rows * nbytes].view(rows, nbytes)


def next_step(state: dict[str, Tensor], key: str = "step") -> int:
    """How often this was called on `state` before: the number of a payload's step."""
    step = state.setdefault(key, torch.zeros((), dtype=torch.int64, device="cpu"))
    step += 1
    return int(step) - 1


@runtime_checkable
class Collective(Protocol):
    """An averaging algorithm: a frozen dataclass of hyper-parameters.

    The contract is the conservation law, over all ranks r
    (`gradtide.testing.check_law`):

        sum_r before_r == P * mean + sum_r after_r

    where `mean` is the flow's result, bit-identical on all ranks, and `after_r` is what
    it left in `payload.flat`, the residual. A flow may return `payload.flat` itself, as
    the mean: the residual is empty then.

    What planner, checkpoints and alarms have to know of it says its attribute `traits`,
    if it has one: a `Traits`. A wrapper holds what it wraps in its field `collective`.
    What depends on more it answers by methods of these names, if it has them:
    `hands_over`, `pays_below`, `dense_next` and `dense_last`, see the functions.
    """

    def reduce(self, payload: Payload, group: Group) -> Flow: ...


@dataclass(frozen=True)
class Traits:
    """What a collective says of itself; nobody asks for its class.

    The defaults hold for one that says nothing.
    """

    dense: bool = False  # everything travels in every step
    rounds_off: bool = False  # though dense: what a wire takes off is kept
    transparent: bool = False  # in the long run a wrapper asks for what is wrapped does
    # For rehearsals. What requests depend on: on the bucket's length in a straight
    # line, on its length in another way, on the shapes of its parts, or on numbers.
    depends_on: Literal["length", "size", "shapes", "numbers"] = "numbers"
    alike: bool = True  # what is gathered from others could be copies of what is sent
    scans: bool = False  # entries are found by `selectors.kernels`
    searches_part: bool = False  # of a bucket, and not by its `select`
    small: int = 0  # bytes up to which values travel in another way
    divisible: bool = True  # works on any slice of a bucket as well as on the whole
    per_entry: tuple[str, ...] = ()  # keys of its state that are like the residual
    uses_optimizer_momentum: bool = False  # `with_momentum(a, b)`: u = a u + b g

    @property
    def residual(self) -> bool:
        """Whether something may stay behind: not, where everything travels exactly."""
        return self.rounds_off or not self.dense


def traits(collective: object) -> Traits:
    """What a collective says of itself; the defaults, if it does not."""
    said = getattr(collective, "traits", None)
    return said if isinstance(said, Traits) else Traits()


def _answer(collective: object, question: str, asked: object, otherwise: Any) -> Any:
    """What a method says, if there is one."""
    return getattr(collective, question, lambda _: otherwise)(asked)


def hands_over(collective: object, size: int) -> bool:
    """Whether its flows ask for a `Handover` among so many ranks."""
    return bool(_answer(collective, "hands_over", size, False))


def pays_below(collective: object, size: int) -> float | None:
    """The density below which fewer bytes travel than densely, if P decides it."""
    bound: float | None = _answer(collective, "pays_below", size, None)
    return bound


def dense_next(collective: object, state: Mapping[str, Tensor]) -> bool:
    """Whether, by a payload's state, the next exchange is a warm-up's dense one."""
    return any(_answer(c, "dense_next", state, False) for c in layers(collective))


def dense_last(collective: object, state: Mapping[str, Tensor]) -> bool:
    """Whether the last exchange was one."""
    return any(_answer(c, "dense_last", state, False) for c in layers(collective))


def layers(collective: object) -> Iterator[object]:
    """A collective and those that are wrapped, from the outside in."""
    while collective is not None:
        yield collective
        collective = inner(collective)


def inner(collective: object) -> Any:
    """What a wrapper wraps; None of what is no wrapper."""
    return getattr(collective, "collective", None)


def settled(collective: object) -> object:
    """What asks for something in the long run: what transparent wrappers wrap."""
    return next(c for c in layers(collective) if not traits(c).transparent)


def density_of(collective: object) -> float | None:
    """The share of entries that travels; None of one that does not select entries."""
    return getattr(collective, "density", None)


def wire_of(collective: object) -> Any:
    """In what values travel, a `Wire`; None where that is their own type."""
    return getattr(collective, "wire", None)


# - What an algorithm remembers --------------------------------------------------------


class Part(Protocol):
    """What has a place in a flat tensor."""

    def of(self, flat: Tensor) -> Tensor:
        """Its part of such a tensor, a view."""


def counts(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The numbers of steps that an algorithm remembers."""
    found = {key: _count(value) for key, value in state.items()}
    return {key: count for key, count in found.items() if count is not None}


def count_on(state: dict[str, Tensor], counted: Mapping[str, int]) -> None:
    """Have an algorithm count on from these numbers."""
    state |= {key: _tensor(count) for key, count in counted.items()}


def carried(
    parts: Sequence[Part], flat: Tensor, before: Sequence[tuple[Part, Payload]]
) -> dict[str, Tensor]:
    """What an algorithm can go on with where a new `flat` is made of former ones.

    `before` says where each of its parts was, and in which payload. What stays
    are the numbers of steps, if those of all former ones are equal, and what has an
    entry for every element. Thresholds, boundaries and factors are about a `flat` as a
    whole, and are learnt anew, as in a first step.
    """
    olds = list({id(payload): payload for _, payload in before}.values())
    kept: dict[str, Tensor] = {}
    for key in {key: None for old in olds for key in old.state}:
        found = [(old, old.state.get(key)) for old in olds]
        numbers = {_count(value) for _, value in found}
        if None not in numbers:
            if len(numbers) == 1:
                kept[key] = _tensor(numbers.pop())
        elif all(_is_like(value, old.flat) for old, value in found):
            kept[key] = torch.zeros_like(flat)
            for part, (place, old) in zip(parts, before, strict=True):
                value = old.state.get(key)
                if value is not None:
                    part.of(kept[key]).copy_(place.of(value))
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
