"""Entries of a bucket on the wire: values and indices in one message.

[Note: encoding] Sorted indices travel as their lower 16 bits, and the number of indices
in every block of 2^16 of the span they lie in: 2 bytes an entry and 4 bytes a block,
whatever the span. The length follows from the number of entries alone, so that nothing
but this number has to be known to receive a message.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradtide.ops import AllGather, AllToAll, Group, ToHost

Wire: TypeAlias = Literal["bf16", "fp16"] | None
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 1 << 16
ALIGN = 8  # bytes: every message begins where any dtype may be viewed

Entries: TypeAlias = tuple[Tensor, Tensor]  # indices (int32, sorted, unique), values
Steps: TypeAlias = Generator[Any, Any, Any]  # a stretch of a flow


def check_wire(name: str, wire: str | None) -> None:
    """Raise ValueError unless `wire` names a dtype that values may travel in."""
    if wire is not None and wire not in WIRES:
        names = ", ".join(map(repr, WIRES))
        raise ValueError(f"{name}(wire={wire!r}): wire is {names} or None")


def check(name: str, density: float, wire: str | None) -> None:
    """Raise ValueError for hyper-parameters that make no sense."""
    if not 0 < density <= 1:
        raise ValueError(
            f"{name}(density={density!r}): density is the share of entries to send, "
            "above 0 and at most 1, such as 0.01"
        )
    check_wire(name, wire)


def wire_dtype(dtype: torch.dtype, wire: Wire) -> torch.dtype:
    """What values of `dtype` travel in: never wider than they are."""
    narrow = WIRES.get(wire or "", dtype)
    return narrow if narrow.itemsize < dtype.itemsize else dtype


def entry_words(dtype: torch.dtype, wire: Wire) -> float:
    """Length of an entry, in values: one value, and an index of 16 bits."""
    return 1 + 2 / wire_dtype(dtype, wire).itemsize


def length(count: int, span: int, dtype: torch.dtype) -> int:
    """Bytes of a message of `count` entries, with indices below `span`."""
    nbytes = count * (dtype.itemsize + 2) + 4 * _blocks(span)
    return -(-nbytes // ALIGN) * ALIGN if count else 0


def pack(where: Tensor, values: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """One message (uint8) of entries with sorted indices below `span`."""
    count = len(where)
    message = where.new_empty(length(count, span, dtype), dtype=torch.uint8)
    if count:
        widths, blocks, low = _fields(message, count, span, dtype)
        widths.copy_(values)
        edges = torch.arange(0, span + BLOCK, BLOCK, device=where.device)
        begins = torch.searchsorted(where, edges.clamp_(max=span).to(where.dtype))
        blocks.copy_(begins[1:] - begins[:-1])
        low.copy_(where & (BLOCK - 1))
    return message


def unpack(message: Tensor, count: int, span: int, dtype: torch.dtype) -> Entries:
    """The entries of a message of `pack`."""
    if not count:
        empty = message.new_empty(0, dtype=torch.int32)
        return empty, empty.to(dtype)
    values, blocks, low = _fields(message, count, span, dtype)
    where = low.to(torch.int32) if span < 1 << 31 else low.to(torch.int64)
    if span > BLOCK:
        begins = torch.arange(len(blocks), device=message.device, dtype=where.dtype)
        where += (begins * BLOCK).repeat_interleave(blocks, output_size=count)
    return where, values


def counts(mine: Sequence[int], like: Tensor, group: Group) -> Steps:
    """Everybody's numbers, as lists in rank order: in one hop, not around a ring."""
    own = torch.tensor(mine, dtype=torch.int64, device=like.device)
    ones = [1] * group.size
    everybody = yield AllToAll(own.expand(group.size, -1), ones, ones)
    everybody = yield ToHost(everybody)
    return everybody.tolist()


def gather(where: Tensor, values: Tensor, span: int, wire: Wire, group: Group) -> Steps:
    """Everybody's entries, in rank order; any number from each rank."""
    numbers = yield from counts([len(where)], values, group)
    return (
        yield from gather_known(
            where, values, span, wire, group, [row[0] for row in numbers]
        )
    )


def gather_known(
    where: Tensor,
    values: Tensor,
    span: int,
    wire: Wire,
    group: Group,
    numbers: Sequence[int],
) -> Steps:
    """`gather` when everybody knows how many entries each rank has."""
    dtype = wire_dtype(values.dtype, wire)
    sizes = [length(n, span, dtype) for n in numbers]
    message = pack(where, values, span, dtype)
    if not sum(sizes):
        return [(where, values)] * group.size
    everything = yield AllGather(message, sizes)
    return [
        unpack(part, n, span, dtype)
        for part, n in zip(torch.split(everything, sizes), numbers, strict=True)
    ]


def exchange(
    rows: Sequence[Entries],
    spans: Sequence[int],
    wire: Wire,
    group: Group,
    numbers: Sequence[int],
) -> Steps:
    """Send `rows[r]` to rank r; returns the entries from every rank, in rank order.

    Indices are relative to the receiver's part, of `spans[r]` elements; `numbers[r]`
    is how many entries rank r has for this one. This rank's own row does not travel
    but is rounded as if it did.
    """
    dtype = wire_dtype(rows[0][1].dtype, wire)
    own = spans[group.rank]
    leaving = [
        pack(where, values, span, dtype)
        for (where, values), span in zip(rows, spans, strict=True)
    ]
    send = [len(message) for message in leaving]
    recv = [length(n, own, dtype) for n in numbers]
    arrived = yield AllToAll(torch.cat(leaving), send, recv)
    return [
        unpack(part, n, own, dtype)
        for part, n in zip(torch.split(arrived, recv), numbers, strict=True)
    ]


def _blocks(span: int) -> int:
    """Block counts in a message; a span of one block needs none."""
    return -(-span // BLOCK) if span > BLOCK else 0


def _fields(
    message: Tensor, count: int, span: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, block counts (int32) and lower halves (uint16): the wider come first."""
    sizes = [4 * _blocks(span), count * dtype.itemsize, 2 * count]
    if dtype.itemsize > 4:
        sizes[0], sizes[1] = sizes[1], sizes[0]
    first, second, third = accumulate(sizes)
    a, b, c = message[:first], message[first:second], message[second:third]
    if dtype.itemsize > 4:
        a, b = b, a
    return b.view(dtype), a.view(torch.int32), c.view(torch.uint16)
