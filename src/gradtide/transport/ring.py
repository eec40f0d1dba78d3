"""Ring reduce-scatter and all-gather: (P - 1) / P of the buffer over each link.

[Note: pieces] Every part travels in pieces, and a piece leaves as soon as it has been
added, or is here, while the next one is still arriving. It is added while it is in
cache. Each part is summed in ring order, starting with the rank after its owner, so the
result does not depend on timing.

[Note: uneven parts] Where all parts are alike, every link carries one at any time. A
part that is much larger than the others passes from link to link while the others rest;
in more and smaller pieces it is on all links at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import iadd
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtide.core.ops import Group
from gradtide.transport.links import (
    CHUNK,
    Memory,
    Piece,
    Track,
    Transfer,
    memory_of,
)

PIECES = 4  # of a part, at the least: more => what arrives waits less
SMALLEST = 1 << 16  # bytes: every piece wakes the thread
UNEVEN = 2.0  # times the mean from which a part counts as larger than the others
FINE = 1 << 15  # bytes of a piece of such a part, at the least
HOPS = 2  # of its pieces, so many for each rank
BY_NUMPY = {torch.float32, torch.float64}  # it adds as fast, and is called sooner

PassOn: TypeAlias = Callable[[Memory], object]
Cut: TypeAlias = Callable[[Tensor, PassOn | None, int], Iterator[Piece]]


def reduce_scatter(
    parts: Sequence[Tensor], group: Group, track: Track, ranks: Sequence[int]
) -> Transfer:
    """Begin to sum the ranks' `parts` (1-D, one per rank), each in its owner's memory.

    The parts of others are used up. `ranks` are the group's, by their numbers in the
    transport's group.
    """
    dtype, width = parts[0].dtype, parts[0].element_size()
    scratch = track.scratch(ranks[group.rank - 1], CHUNK)
    arrival, numbers = memory_of(scratch), scratch.view(dtype)
    array = Tensor.numpy if dtype in BY_NUMPY else Tensor.detach
    new: Any = array(numbers)

    def cut(part: Tensor, pass_on: PassOn | None, count: int) -> Iterator[Piece]:
        own: Any = array(part)
        memory, most = memory_of(part), max(1, -(-part.numel() // count))
        for start in range(0, part.numel(), most):
            target = own[start : start + most]
            then = partial(iadd, target, new[: len(target)])
            piece = memory[start * width : (start + most) * width]
            if pass_on is not None:
                then = partial(_both, then, partial(pass_on, piece))
            yield Piece(arrival[: len(piece)], then)

    return _around(parts, group, track, ranks, group.rank - 1, cut)


def all_gather(
    parts: Sequence[Tensor], group: Group, track: Track, ranks: Sequence[int]
) -> Transfer:
    """Begin to fill everybody's `parts` (1-D, one per rank) from their owners."""

    def cut(part: Tensor, pass_on: PassOn | None, count: int) -> Iterator[Piece]:
        memory = memory_of(part)
        if pass_on is None:
            yield Piece(memory)
            return
        most = max(1, -(-len(memory) // count))
        for start in range(0, len(memory), most):
            piece = memory[start : start + most]
            yield Piece(piece, partial(pass_on, piece))

    return _around(parts, group, track, ranks, group.rank, cut)


def _both(first: Callable[[], object], then: Callable[[], object]) -> None:
    first()
    then()


def _around(
    parts: Sequence[Tensor],
    group: Group,
    track: Track,
    ranks: Sequence[int],
    begin: int,
    cut: Cut,
) -> Transfer:
    """Send part number `begin` unasked, and pass on all that arrive but the last."""
    rank, size = group
    mean = sum(part.nbytes for part in parts) / size
    first, *hops = (parts[(begin - hop) % size] for hop in range(size))
    following, source = ranks[(rank + 1) % size], ranks[rank - 1]
    leaving = deque([(following, memory_of(first))])

    def pass_on(memory: Memory) -> None:
        leaving.append((following, memory))

    def pieces(part: Tensor, pass_on: PassOn | None) -> Iterator[Piece]:
        uneven = part.nbytes > UNEVEN * mean
        return cut(part, pass_on, num_pieces(part.nbytes, size, uneven))

    last = hops.pop()
    passing = chain.from_iterable(pieces(part, pass_on) for part in hops)
    unsent = sum(part.nbytes for part in (first, *hops))
    arriving = {source: chain(passing, pieces(last, None))}
    return Transfer(track, leaving, arriving, unsent)


def carried(total: float, largest: float, smallest: float, size: int) -> float:
    """Bytes that a link passes while a ring over parts of these bytes is at work.

    These are all parts but one. But a part that is larger than the others arrives at
    its last rank after `size` - 1 hops, one piece behind the other, and not earlier.
    """
    uneven = largest * size > UNEVEN * total
    pieces = num_pieces(math.ceil(largest), size, uneven)
    return max(total - smallest, largest * (1 + (size - 2) / pieces))


def num_pieces(nbytes: int, size: int, uneven: bool) -> int:
    """Into how many pieces a part of so many bytes is cut among `size` ranks.

    `uneven`: it is much larger than the others, see [Note: uneven parts].
    """
    count = max(1, min(PIECES, nbytes // SMALLEST), -(-nbytes // CHUNK))
    return max(count, min(HOPS * size, nbytes // FINE)) if uneven else count
