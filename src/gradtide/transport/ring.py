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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtide.transport.link import Arrival
from gradtide.transport.links import Peers, Transfer, memory_of
from gradtide.transport.stream import CHUNK, Memory

PIECES = 4  # of a part, at the least: more => what arrives waits less
SMALLEST = 1 << 16  # bytes: every piece wakes the thread
UNEVEN = 2.0  # times the mean from which a part counts as larger than the others
FINE = 1 << 15  # bytes of a piece of such a part, at the least
HOPS = 2  # of its pieces, so many for each rank
BY_NUMPY = {torch.float32, torch.float64}  # it adds as fast, and is called sooner


def reduce_scatter(parts: Sequence[Tensor], peers: Peers, divisor: int = 1) -> Transfer:
    """Begin to sum the ranks' `parts` (1-D, one per rank), each in its owner's memory.

    The owner divides the sum. The parts of others are used up.
    """
    return _around(parts, peers, add=True, divisor=divisor)


def all_gather(parts: Sequence[Tensor], peers: Peers) -> Transfer:
    """Begin to fill everybody's `parts` (1-D, one per rank) from their owners."""
    return _around(parts, peers, fill=True)


def all_reduce(parts: Sequence[Tensor], peers: Peers, divisor: int = 1) -> Transfer:
    """Begin to sum `parts` (1-D, one per rank) everywhere; owners divide their sums.

    That is both of the above; a piece of a sum leaves as soon as its owner has it.
    """
    return _around(parts, peers, add=True, fill=True, divisor=divisor)


def _around(
    parts: Sequence[Tensor],
    peers: Peers,
    add: bool = False,
    fill: bool = False,
    divisor: int = 1,
) -> Transfer:
    """Send one part unasked, and pass on all that arrive but the last.

    First what arrives is to `add`, up to this rank's own part; then it is to `fill`.
    """
    (rank, size), track, ranks = peers
    dtype, width = parts[0].dtype, parts[0].element_size()
    adding = size - 1 if add else 0
    begin, hops = rank - add, adding + (size - 1 if fill else 0)
    first, *coming = (parts[(begin - hop) % size] for hop in range(hops + 1))
    following, source = ranks[(rank + 1) % size], ranks[rank - 1]
    leaving = deque([(following, memory_of(first))])
    mean = sum(part.nbytes for part in parts) / size
    scratch = track.scratch(source, CHUNK if add else 0)
    arrived, numbers = memory_of(scratch), scratch.view(dtype)
    array = Tensor.numpy if dtype in BY_NUMPY else Tensor.detach
    new: Any = array(numbers)

    def pieces() -> Iterator[Memory]:
        for hop, part in enumerate(coming, 1):
            own: Any = array(part)
            memory, numel, last = memory_of(part), part.numel(), hop == hops
            uneven = part.nbytes > UNEVEN * mean
            count = num_pieces(part.nbytes, size, uneven)
            most = max(1, numel if last and fill else -(-numel // count))
            for start in range(0, numel, most):
                piece = memory[start * width : (start + most) * width]
                if hop > adding:
                    yield piece
                else:
                    yield arrived[: len(piece)]
                    target = own[start : start + most]
                    target += new[: len(target)]
                    if hop == adding and divisor != 1:
                        target /= divisor
                if not last:
                    leaving.append((following, piece))

    unsent = sum(part.nbytes for part in (first, *coming[:-1]))
    arrival = Arrival(sum(part.nbytes for part in coming), pieces())
    return Transfer(track, leaving, {source: arrival}, unsent)


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
