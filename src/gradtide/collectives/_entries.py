"""Entries of a bucket on the wire: values and indices in one message.

[Note: encoding] A message has the values, as a codec writes them, and behind these the
indices (`wire.indices`). The length follows from the number of entries and the span
that they lie in, so that nothing but this number has to be known to receive it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtide.core.devices import on_device
from gradtide.core.ops import AllGather, AllToAll, Group, ToHost
from gradtide.core.ops import Steps as Steps
from gradtide.core.payload import Traits
from gradtide.selectors import Selector, Threshold
from gradtide.selectors.indices import index_dtype
from gradtide.wire import WIRES, Codec, Wire, codec_of
from gradtide.wire.indices import Indices

ALIGN = 8  # bytes: every message begins where any dtype may be viewed

Entries: TypeAlias = tuple[Tensor, Tensor]  # indices (int32, sorted, unique), values


def check(collective: Any, **counts: str) -> None:
    """Raise ValueError for hyper-parameters that make no sense.

    `counts` are the fields that count something, and what.
    """
    name, wire = type(collective).__name__, collective.wire
    density = getattr(collective, "density", 1.0)
    if not 0 < density <= 1:
        raise ValueError(
            f"{name}(density={density!r}): density is the share of entries to send, "
            "above 0 and at most 1, such as 0.01"
        )
    if wire is not None and wire not in WIRES:
        names = ", ".join(map(repr, WIRES))
        raise ValueError(f"{name}(wire={wire!r}): wire is {names} or None")
    for field, what in counts.items():
        if (value := getattr(collective, field)) < 1:
            raise ValueError(
                f"{name}({field}={value}): {field} counts {what}, 1 or more"
            )


@dataclass(frozen=True)
class Selecting:
    """What collectives have in common whose ranks select entries by magnitude.

    A bucket for which this would not send fewer bytes travels by `Dense`, and then the
    casts of `wire` are lost.

    Args:
        density: The share k/n of the n entries of a bucket that a rank selects, above 0
            and at most 1. Larger values cost more bytes and delay fewer entries. The
            default, 0.01, is a starting point; "Learning" in benchmarks/README.md shows
            what densities do to a loss.
        select: The selector that finds the entries: `Threshold()` or `Exact()`. The
            default takes one pass over the bucket, where `Exact()` takes far longer.
        wire: In what values travel, see `Dense`. None, the default, rounds nothing.
            What a wire takes off goes to the residual.

    Raises:
        ValueError: A field is outside its range.
    """

    density: float = 0.01
    select: Selector = Threshold()  # noqa: RUF009  (frozen: not shared by mistake)
    wire: Wire = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def traits(self) -> Traits:
        return Traits(scans=getattr(self.select, "scans", False))


def kept(density: float, n: int) -> int:
    """How many of n entries a density stands for: at least one."""
    return max(1, round(density * n))


def entry_words(dtype: torch.dtype, wire: Wire) -> float:
    """Length of an entry, in values, where it is decided whether entries travel.

    An index counts as two bytes, which it hardly ever takes: so a change of its code is
    no change of what is averaged.
    """
    return 1 + 2 / codec_of(wire, dtype).width


def length(count: int, span: int, codec: Codec) -> int:
    """Bytes of a message of `count` entries, with indices below `span`."""
    nbytes = codec.nbytes(count) + Indices(count, span).nbytes
    return -(-nbytes // ALIGN) * ALIGN if count else 0


def density_of_share(share: float, wire: Wire) -> float:
    """The density at which entries take as many bytes as a share of all values does.

    Entries of a long bucket of float32. Where none is so high: 1 at most.
    """
    codec, n = codec_of(wire, torch.float32), 1 << 24
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        shorter = length(middle, n, codec) < share * codec.nbytes(n)
        low, high = (middle, high) if shorter else (low, middle)
    return high / n


class Encoding(NamedTuple):
    """How entries travel, see [Note: encoding]."""

    span: int  # indices are below it
    codec: Codec
    dtype: torch.dtype  # of values, before and after

    def length(self, count: int) -> int:
        """Bytes of a message of `count` entries."""
        return length(count, self.span, self.codec)

    def pack(self, entries: Entries) -> Tensor:
        """One message (uint8) of entries with sorted indices.

        The values are left with what the codec rounded off.
        """
        where, values = entries
        count = len(where)
        message = where.new_empty(self.length(count), dtype=torch.uint8)
        if count:
            coded, indices = self._parts(message, count)
            self.codec.encode(values, coded)
            Indices(count, self.span).encode(where, indices)
        return message

    def unpack(self, message: Tensor, count: int) -> Entries:
        """The entries of a message of `pack`."""
        if not count:
            nothing = message.new_empty(0)
            return nothing.to(torch.int32), nothing.to(self.dtype)
        coded, indices = self._parts(message, count)
        if self.codec.exact:
            values = coded.view(self.dtype)
        else:
            values = message.new_empty(count, dtype=self.dtype)
            self.codec.decode(coded, values)
        dtype = index_dtype(self.span)
        return Indices(count, self.span).decode(indices, count, dtype), values

    def _parts(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Values and indices (uint8), where they lie in a message."""
        coded = self.codec.nbytes(count)
        whole = coded + Indices(count, self.span).nbytes
        return message[:coded], message[coded:whole]


def unpack_all(
    stream: Tensor, numbers: Sequence[int], encodings: Sequence[Encoding]
) -> list[Entries]:
    """The entries of messages that lie one after the other."""
    kinds = list(zip(encodings, numbers, strict=True))
    parts = torch.split(stream, [encoding.length(n) for encoding, n in kinds])
    rows = zip(parts, kinds, strict=True)
    return [encoding.unpack(part, n) for part, (encoding, n) in rows]


def filled_up(entries: Entries, count: int) -> Entries:
    """`count` entries: zeros at the last index make up for those that are missing."""
    where, values = entries
    missing = count - len(where)
    if not missing:
        return entries
    where = torch.cat([where, where[-1:].expand(missing)])
    return where, torch.cat([values, values.new_zeros(missing)])


def summed(entries: Sequence[Entries], dtype: torch.dtype) -> Entries:
    """The sum of entries: sorted unique indices, and values of `dtype`.

    Added one rank after the other, so that the sums are the same everywhere: a GPU adds
    up what one call has for an index in an order of chance.
    """
    everywhere = torch.cat([where for where, _ in entries])
    union, inverse = torch.unique(everywhere, return_inverse=True)
    sums = torch.zeros(len(union), dtype=dtype, device=union.device)
    places = torch.split(inverse, [len(where) for where, _ in entries])
    for place, (_, values) in zip(places, entries, strict=True):
        sums.index_add_(0, place, values.to(dtype))
    return union, sums


def tell(own: Tensor, group: Group) -> Steps:
    """Everybody's `own` in rank order: in one hop, where a ring would take P - 1."""
    ones = [1] * group.size
    return (yield AllToAll(own.expand(group.size, *own.shape), ones, ones))


def counts(where: Tensor, group: Group) -> Steps:
    """How many indices every rank has."""
    own = on_device([len(where)], torch.int64, where.device)
    everybody = yield from tell(own, group)
    return (yield ToHost(everybody)).flatten().tolist()


def gather(message: Tensor, numbers: Sequence[int], encoding: Encoding) -> Steps:
    """Everybody's entries, in rank order, by this rank's message and the others'.

    `numbers` are how many entries each rank has.
    """
    sizes = [encoding.length(n) for n in numbers]
    if sum(sizes):
        message = yield AllGather(message, sizes)
    return unpack_all(message, numbers, [encoding] * len(numbers))


def exchange(
    messages: Sequence[Tensor], numbers: Sequence[int], encoding: Encoding
) -> Steps:
    """Send `messages[r]` to rank r; returns the entries from every rank, in rank order.

    Indices are relative to the receiver's part, whose `encoding` it is here;
    `numbers[r]` is how many entries rank r has for this one. This rank's own row does
    not travel but is rounded as if it did.
    """
    recv = [encoding.length(n) for n in numbers]
    arrived = yield AllToAll(torch.cat(list(messages)), list(map(len, messages)), recv)
    return unpack_all(arrived, numbers, [encoding] * len(numbers))
