"""Every part's largest entries go to its owner; the mean travels densely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.bucket import Payload, rounded_off
from gradtide.collectives._entries import (
    Entries,
    Steps,
    Wire,
    check,
    entry_words,
    exchange,
    wire_dtype,
)
from gradtide.collectives.dense import Dense
from gradtide.ops import AllGather, Cut, Flow, Group
from gradtide.select import Exact, Selector, Threshold, largest

PART = "part"  # begins the keys of what a selector remembers of a part
MARGIN = 1.25  # candidates asked of a selector, for each entry that is sent
STEP = 4096  # elements: what is left of a conversion in place is copied aside


@dataclass(frozen=True)
class TopKA2A:
    """The k/P largest entries of each of P parts are sent to the part's owner, who adds
    them up and sends the finished mean of its part to everybody (Li, ICPP 2024).

    Two rounds of P - 1 messages, (1.5 k + n) (P - 1) / P words a rank (for float32: an
    index takes half a word): never less than half of what `Dense` moves, but the same
    amount at every step. Leaves behind what was not selected. Buckets for which this
    does not pay (`pays`) are exchanged by `Dense`.

    `select` is asked for the entries of one part at a time, and for a quarter more than
    are sent: of its candidates the largest go. If it finds too few, the message is
    filled up with zeros.

    With `wire` ("bf16", "fp16") values are rounded when they leave: every contribution
    once, the mean once. What is rounded off stays behind, with its sender and with the
    owner of the part; only what somebody multiplies the part by at the `Cut` is rounded
    for good. Buckets that travel by `Dense` lose their roundings.
    """

    density: float = 0.01
    select: Selector = Threshold()  # noqa: RUF009  (frozen: not shared by mistake)
    wire: Wire = None

    def __post_init__(self) -> None:
        check("TopKA2A", self.density, self.wire)

    def reduce(self, load: Payload, group: Group) -> Flow:
        kept = kept_of_part(load.flat, self.density, self.wire, group)
        if not kept:
            return (yield from Dense(self.wire).reduce(load, group))
        part = load.mean_memory().view(group.size, -1)[group.rank].zero_()
        yield from collect(part, load, kept, self.select, self.wire, group)
        return (yield from spread(part, load, self.wire, group))


# - Conditions of use -----------------------------------------------------------------


def pays(n: int, k: int, size: int, *, entry: float = 2.0) -> bool:
    """Whether TopKA2A, sending k of n elements, beats a dense exchange among P = size.

    Times are in words: the time that one element takes on the wire. An entry is `entry`
    words long (2 for an index as long as a value, 1.5 for float32 and `_entries`).
    TopKA2A moves (entry k + n) (P - 1) / P words and dense 2 n (P - 1) / P: it pays at
    densities below 1 / entry, with a gain below 2.
    """
    return entry * k + n < 2 * n and size > 1


def kept_of_part(flat: Tensor, density: float, wire: Wire, group: Group) -> int:
    """How many entries of every part are sent; 0 if the bucket travels densely."""
    span = len(flat) // group.size
    kept = min(max(round(density * span), 1), span)
    entry = entry_words(flat.dtype, wire)
    worthwhile = pays(len(flat), kept * group.size, group.size, entry=entry)
    return kept if worthwhile else 0


# - The first half --------------------------------------------------------------------


def collect(
    part: Tensor, load: Payload, kept: int, select: Selector, wire: Wire, group: Group
) -> Steps:
    """Add to `part` (zeros) the mean of what all ranks send of this rank's part."""
    size, dtype = group.size, load.flat.dtype
    found = largest_of_parts(load.salience.view(size, -1), kept, select, load.state)
    where = in_whole(found, len(part), len(load.flat))
    values = load.take(where, wire_dtype(dtype, wire))
    lengths = [len(row) for row in found]
    rows = [
        _fill_up(row, own, kept)
        for row, own in zip(found, torch.split(values, lengths), strict=True)
    ]
    received = yield from exchange(rows, [len(part)] * size, wire, group, [kept] * size)
    for idx, row in received:
        part.index_add_(0, idx, row.to(dtype))
    part.div_(size)


def largest_of_parts(
    parts: Tensor, kept: int, select: Selector, state: dict[str, Tensor]
) -> Sequence[Tensor]:
    """Sorted indices of the largest entries of every row; at most `kept` of each."""
    if isinstance(select, Exact):
        found = torch.topk(parts.abs(), kept, dim=1, sorted=False).indices
        return list(found.sort(1).values.to(torch.int32))
    wanted = min(round(MARGIN * kept) + 1, parts.shape[1])
    states: list[dict[str, Tensor]] = [{} for _ in parts]
    for key, value in state.items():
        part, _, own = key.removeprefix(PART).partition(".")
        if key.startswith(PART):
            states[int(part)][own] = value
    rows = []
    for i, (row, memory) in enumerate(zip(parts, states, strict=True)):
        candidates = select(row, wanted, memory)
        state.update({f"{PART}{i}.{own}": value for own, value in memory.items()})
        rows.append(largest(row, kept, candidates))
    return rows


def _fill_up(where: Tensor, values: Tensor, kept: int) -> Entries:
    """Entries with zeros at the last index, so that there are `kept` of them."""
    missing = kept - len(where)
    if not missing:
        return where, values
    where = torch.cat([where, where[-1:].expand(missing)])
    return where, torch.cat([values, values.new_zeros(missing)])


def in_whole(rows: Sequence[Tensor], span: int, n: int) -> Tensor:
    """Indices in the bucket (n elements) for those in each part (span elements)."""
    dtype = torch.int32 if n < 1 << 31 else torch.int64
    return torch.cat([row.to(dtype) + i * span for i, row in enumerate(rows)])


# - The second half -------------------------------------------------------------------


def spread(part: Tensor, load: Payload, wire: Wire, group: Group) -> Flow:
    """Give every rank all parts of the mean; the result lies in the mean's memory."""
    mean = load.mean_memory()
    dtype = wire_dtype(mean.dtype, wire)
    if dtype == mean.dtype:
        yield Cut(part)
        whole: Tensor = yield AllGather(part, into=mean)
        return whole
    # Before the cut: what is cut out of a part later is not in the residual's units.
    rest = rounded_off(part, part.to(dtype))
    part.sub_(rest)
    load.flat.view(group.size, -1)[group.rank].add_(rest, alpha=group.size)
    yield Cut(part)
    narrow = mean.view(dtype)[-len(mean) :]
    yield AllGather(part.to(dtype), into=narrow)
    return widen(mean, narrow)


def widen(wide: Tensor, narrow: Tensor) -> Tensor:
    """`narrow`, as long and at the end of the same memory, converted in place.

    From front to back, each time as far as what was read already has left room.
    """
    n, begin = len(wide), 0
    a, b = wide.itemsize, narrow.itemsize
    while n - begin > STEP:
        end = (n * (a - b) + begin * b) // a
        wide[begin:end] = narrow[begin:end]
        begin = end
    wide[begin:] = narrow[begin:].clone()
    return wide
