"""Entries of a bucket on the wire: values and indices in one message.

[Note: encoding] Sorted indices travel as their lower 16 bits, and the number of indices
in every block of 2^16 of the span they lie in: 2 bytes an entry and 4 bytes a block,
whatever the span. The length follows from the number of entries alone, so that nothing
but this number has to be known to receive a message.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradtide.core.ops import AllGather, AllToAll, Group, ToHost
from gradtide.core.payload import Traits
from gradtide.selectors import Selector, Threshold
from gradtide.selectors.kernels import index_dtype

Wire: TypeAlias = Literal["bf16", "fp16"] | None
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 1 << 16
ALIGN = 8  # bytes: every message begins where any dtype may be viewed

Entries: TypeAlias = tuple[Tensor, Tensor]  # indices (int32, sorted, unique), values
Steps: TypeAlias = Generator[Any, Any, Any]  # a stretch of a flow


def check(name: str, wire: str | None, density: float = 1.0) -> None:
    """Raise ValueError for hyper-parameters that make no sense."""
    if not 0 < density <= 1:
        raise ValueError(
            f"{name}(density={density!r}): density is the share of entries to send, "
            "above 0 and at most 1, such as 0.01"
        )
    if wire is not None and wire not in WIRES:
        names = ", ".join(map(repr, WIRES))
        raise ValueError(f"{name}(wire={wire!r}): wire is {names} or None")


@dataclass(frozen=True)
class Selecting(Traits):
    """What collectives have in common whose ranks select entries by magnitude.

    Buckets for which this does not pay (`pays`) are exchanged by `Dense`.

    Args:
        density: The share k/n of the n entries of a bucket that a rank selects, above 0
            and at most 1. Larger values cost more bytes and delay fewer entries. The
            default, 0.01, is a starting point; "Learning" in benchmarks/README.md shows
            what densities do to a loss.
        select: The selector that finds the entries: `Threshold()` or `Exact()`. The
            default takes one pass over the bucket, where `Exact()` takes far longer.
        wire: What values are cast to when they travel: "bf16", "fp16", or None. None is
            the default because it rounds nothing. What a cast takes off goes to the
            residual, unless a collective says otherwise.

    Raises:
        ValueError: A field is outside its range.
    """

    density: float = 0.01
    select: Selector = Threshold()  # noqa: RUF009  (frozen: not shared by mistake)
    wire: Wire = None

    def __post_init__(self) -> None:
        check(type(self).__name__, self.wire, self.density)


def kept(density: float, n: int) -> int:
    """How many of n entries a density stands for: at least one."""
    return max(1, round(density * n))


def wire_dtype(dtype: torch.dtype, wire: Wire) -> torch.dtype:
    """What values of `dtype` travel in: never wider than they are."""
    narrow = WIRES.get(wire or "", dtype)
    return narrow if narrow.itemsize < dtype.itemsize else dtype


def entry_words(dtype: torch.dtype, wire: Wire) -> float:
    """Length of an entry, in values: one value, and an index of 16 bits."""
    return 1 + 2 / wire_dtype(dtype, wire).itemsize


def length(count: int, span: int, dtype: torch.dtype) -> int:
    """Bytes of a message of `count` entries, with indices below `span`."""
    nbytes = count * (dtype.itemsize + 2) + 4 * num_blocks(span)
    return -(-nbytes // ALIGN) * ALIGN if count else 0


def encode(where: Tensor, span: int, blocks: Tensor, halves: Tensor) -> None:
    """Write sorted indices below `span` to block counts and lower halves."""
    if len(blocks):
        edges = torch.arange(0, span + BLOCK, BLOCK, device=where.device)
        begins = torch.searchsorted(where, edges.clamp_(max=span).to(where.dtype))
        blocks.copy_(begins.diff())
    halves[: len(where)].copy_(where & (BLOCK - 1))


def decode(blocks: Tensor, halves: Tensor, dtype: torch.dtype) -> Tensor:
    """The indices that `encode` wrote; `halves` holds these alone."""
    where = halves.to(dtype)
    if len(blocks):
        begins = torch.arange(len(blocks), device=where.device, dtype=dtype) * BLOCK
        where += begins.repeat_interleave(blocks, output_size=len(where))
    return where


def pack(entries: Entries, span: int, dtype: torch.dtype) -> Tensor:
    """One message (uint8) of entries with sorted indices below `span`."""
    where, values = entries
    count = len(where)
    message = where.new_empty(length(count, span, dtype), dtype=torch.uint8)
    if count:
        widths, blocks, halves = _fields(message, count, span, dtype)
        widths.copy_(values)
        encode(where, span, blocks, halves)
    return message


def unpack(message: Tensor, count: int, span: int, dtype: torch.dtype) -> Entries:
    """The entries of a message of `pack`."""
    if not count:
        empty = message.new_empty(0, dtype=torch.int32)
        return empty, empty.to(dtype)
    values, blocks, halves = _fields(message, count, span, dtype)
    return decode(blocks, halves, index_dtype(span)), values


def unpack_all(
    stream: Tensor, numbers: Sequence[int], spans: Sequence[int], dtype: torch.dtype
) -> list[Entries]:
    """The entries of messages that lie one after the other."""
    sizes = [length(n, span, dtype) for n, span in zip(numbers, spans, strict=True)]
    parts = torch.split(stream, sizes)
    return [unpack(*each, dtype) for each in zip(parts, numbers, spans, strict=True)]


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

    Added one rank after the other, so that the sums are the same everywhere.
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
    own = torch.tensor([len(where)], dtype=torch.int64, device=where.device)
    everybody = yield from tell(own, group)
    return (yield ToHost(everybody)).flatten().tolist()


def gather(
    mine: Entries, numbers: Sequence[int], span: int, wire: Wire, group: Group
) -> Steps:
    """Everybody's entries, in rank order; `numbers` are how many each rank has."""
    dtype = wire_dtype(mine[1].dtype, wire)
    sizes = [length(n, span, dtype) for n in numbers]
    message = pack(mine, span, dtype)
    if not sum(sizes):
        return [mine] * group.size
    everything = yield AllGather(message, sizes)
    return unpack_all(everything, numbers, [span] * group.size, dtype)


def exchange(
    rows: Sequence[Entries],
    numbers: Sequence[int],
    spans: Sequence[int],
    wire: Wire,
    group: Group,
) -> Steps:
    """Send `rows[r]` to rank r; returns the entries from every rank, in rank order.

    Indices are relative to the receiver's part, of `spans[r]` elements; `numbers[r]`
    is how many entries rank r has for this one. This rank's own row does not travel
    but is rounded as if it did.
    """
    dtype = wire_dtype(rows[0][1].dtype, wire)
    own = spans[group.rank]
    leaving = [pack(row, span, dtype) for row, span in zip(rows, spans, strict=True)]
    recv = [length(n, own, dtype) for n in numbers]
    arrived = yield AllToAll(torch.cat(leaving), list(map(len, leaving)), recv)
    return unpack_all(arrived, numbers, [own] * group.size, dtype)


def num_blocks(span: int) -> int:
    """Block counts in a message; a span of one block needs none."""
    return -(-span // BLOCK) if span > BLOCK else 0


def _fields(
    message: Tensor, count: int, span: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, block counts (int32) and lower halves (uint16): the wider come first."""
    sizes = [4 * num_blocks(span), count * dtype.itemsize, 2 * count]
    if dtype.itemsize > 4:
        sizes[0], sizes[1] = sizes[1], sizes[0]
    first, second, third = accumulate(sizes)
    a, b, c = message[:first], message[first:second], message[second:third]
    if dtype.itemsize > 4:
        a, b = b, a
    return b.view(dtype), a.view(torch.int32), c.view(torch.uint16)
