"""Every part's largest entries go to its owner, and its mean without zeros to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtide.collectives import _entries
from gradtide.collectives._entries import Encoding, Selecting, Steps, entry_words
from gradtide.collectives.dense import Dense, second_half
from gradtide.core.ops import Cut, Flow, Group
from gradtide.core.payload import Payload
from gradtide.selectors import Exact, Selector, largest
from gradtide.selectors.indices import index_dtype
from gradtide.wire import Codec, Wire, codec_of, round_off

PART = "part"  # begins the keys of what a selector remembers of a part
MARGIN = 1.25  # candidates asked of a selector, for each entry that is sent


@dataclass(frozen=True)
class TopKA2A(Selecting):
    """Send every part's largest entries to its owner, and the mean to everybody.

    The method is by Li (ICPP 2024). A bucket has P equal parts, one for each rank to
    own. A rank sends the k/P largest entries of each to the owner, who adds them up and
    sends the finished mean of the part to all. (The paper sends all of the mean, which
    is never less than half of what `Dense` sends. Here its zeros are left out where
    that is shorter: at most k of a part's values are anything else.)

    Cost, with P ranks: two rounds of P - 1 messages, of the same length in every step.
    A rank sends v + i bytes for each of k entries, and for P k values of the mean, but
    never more than all n of them, times (P - 1) / P. A value has v bytes, 4 for
    float32, 2 with `wire`; an index i, one byte or less ([Note: indices]).

    Residual: what was not selected.

    Args:
        density: The share of a bucket's entries that a rank selects, see `Selecting`.
        select: The selector that finds the entries. It is asked part by part, for a
            quarter more than are sent: the largest of these go, and zeros where it
            finds too few. See `Selecting`.
        wire: In what values travel, see `Selecting`. Every contribution is rounded once
            and the mean once; what that takes off goes to the residual of the sender
            and of the part's owner.

    Raises:
        ValueError: A field is outside its range.
    """

    def reduce(self, payload: Payload, group: Group) -> Flow:
        kept = kept_of_part(payload.flat, self.density, self.wire, group)
        if not kept:
            return (yield from Dense(self.wire).reduce(payload, group))
        codec = codec_of(self.wire, payload.flat.dtype)
        part = payload.mean_buffer().view(group.size, -1)[group.rank].zero_()
        yield from collect(part, payload, kept, self.select, codec, group)
        most = group.size * kept
        return (yield from spread(part, payload, codec, group, most))


def pays(n: int, k: int, size: int, *, entry: float = 2.0) -> bool:
    """Whether TopKA2A, sending k of n elements, beats a dense exchange among P = size.

    With all of the mean it moves (entry k + n) (P - 1) / P words and dense 2 n (P - 1)
    / P, with an entry of `entry` words (1.5 for float32): it pays at densities below 1
    / entry.
    """
    return entry * k + n < 2 * n and size > 1


def kept_of_part(flat: Tensor, density: float, wire: Wire, group: Group) -> int:
    """How many entries of every part are sent; 0 if the bucket travels densely."""
    span = len(flat) // group.size
    kept = min(max(round(density * span), 1), span)
    entry = entry_words(flat.dtype, wire)
    worthwhile = pays(len(flat), kept * group.size, group.size, entry=entry)
    return kept if worthwhile else 0


def collect(
    part: Tensor,
    payload: Payload,
    kept: int,
    select: Selector,
    codec: Codec,
    group: Group,
) -> Steps:
    """Add to `part` (zeros) the mean of what all ranks send of this rank's part."""
    size = group.size
    found = largest_of_parts(
        payload.selection_scores.view(size, -1), kept, select, payload.state
    )
    where = in_whole(found, len(part), len(payload.flat))
    values = payload.pop_entries(where, codec.dtype)
    lengths = [len(row) for row in found]
    rows = [
        _entries.filled_up(entries, kept)
        for entries in zip(found, torch.split(values, lengths), strict=True)
    ]
    encoding = Encoding(len(part), codec, part.dtype)
    messages = [encoding.pack(row) for row in rows]
    if not codec.exact:
        # Also what a wire without zeros made of those that rows were filled up with.
        where = in_whole([idx for idx, _ in rows], len(part), len(payload.flat))
        payload.add_residual(where, torch.cat([rest for _, rest in rows]))
    received = yield from _entries.exchange(messages, [kept] * size, encoding)
    for idx, row in received:
        part.index_add_(0, idx, row)
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


def in_whole(rows: Sequence[Tensor], span: int, n: int) -> Tensor:
    """Indices in the bucket (n elements) for those in each part (span elements)."""
    dtype = index_dtype(n)
    return torch.cat([row.to(dtype) + i * span for i, row in enumerate(rows)])


def spread(
    part: Tensor,
    payload: Payload,
    codec: Codec,
    group: Group,
    most: int | None = None,
) -> Flow:
    """Give every rank all parts of the mean; the result lies in the mean's memory.

    At most so many values of a part are not zero, if that is known.
    """
    if not codec.exact:
        # Before the cut: what is cut out of a part later is not in the residual's
        # units.
        own = payload.flat.view(group.size, -1)[group.rank]
        own.add_(round_off(part, codec), alpha=group.size)
    yield Cut(part)
    whole = payload.mean_buffer()
    return (yield from second_half(whole, part, codec, payload, group, most))
