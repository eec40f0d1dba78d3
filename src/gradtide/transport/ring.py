"""Ring reduce-scatter and all-gather from point-to-point messages.

Gloo's own reduce-scatter moves the bytes of an all-reduce, and its all-gather falls
20 % short of a 1 Gb/s link among 8 hosts; these two move (P - 1) / P of the buffer
each.

[Note: segments] Every part travels in segments, and a segment leaves as soon as it has
been added, while the next one is still arriving: the wire is idle for one segment's
addition per ring, not for one part's addition per step. A segment is also added while
it is in cache.

[Note: uneven parts] Where all parts are alike, every link carries one at any time. A
part that is much larger than the others passes from link to link while the others rest;
in more and smaller segments it is on all links at once.

[Note: posted receives] Gloo sends no byte before the receiver has named its memory.
Some receives are therefore posted ahead, so that no segment waits for a round trip.

[Note: drained] A ring that has posted all its messages calls `drained`, and what comes
next may post its first ones behind them: the wire does not rest between two rings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, cycle
from typing import Protocol, TypeAlias

from torch import Tensor

from gradtide.core.ops import Group

SEGMENTS = 4  # of a part, at the least: more => the addition hides better
SMALLEST = 1 << 19  # bytes: a message costs about 50 us of Python
LARGEST = 1 << 20  # bytes: what is added should still be in cache
UNEVEN = 2.0  # times the mean from which a part counts as larger than the others
FINE = 1 << 15  # bytes of a segment of such a part, at the least
HOPS = 2  # of its segments, so many for each rank
AHEAD = 6  # receives posted before they are needed

Wait: TypeAlias = Callable[[], object]


class Messages(Protocol):
    """Point-to-point messages, in order for each pair of ranks.

    What posts one returns what waits until it is through.
    """

    def send(self, tensor: Tensor, peer: int) -> Wait: ...
    def receive(self, tensor: Tensor, peer: int) -> Wait: ...


class Ring:
    """A ring that has begun; `finish` once, in the order of beginning.

    This rank sends part number `begin` unasked, and all that arrive but the last
    travel on. Each goes to the memory that `place` gives for its segments.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        group: Group,
        messages: Messages,
        begin: int,
        place: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda own: own,
    ) -> None:
        rank, size = group
        self._send = partial(messages.send, peer=(rank + 1) % size)
        self._receive = partial(messages.receive, peer=(rank - 1) % size)
        cut = segments(parts)
        first, *hops = (cut(parts[(begin - hop) % size]) for hop in range(size))
        self._targets = targets = [*chain.from_iterable(hops)]
        self._final = len(targets) - len(hops[-1])  # from here on nothing travels on
        self._arrivals = place(targets)
        self._received = [*map(self._receive, self._arrivals[:AHEAD])]
        self._sent = [*map(self._send, first)]

    def finish(self, drained: Callable[[], None]) -> None:
        """Drive the ring to its end; `drained` is called when all has been posted."""
        arrivals, received, sent = self._arrivals, self._received, self._sent
        posted = max(self._final, len(arrivals) - AHEAD)
        for i, (target, new) in enumerate(zip(self._targets, arrivals, strict=True)):
            if i >= posted:
                drained()
            received[i]()
            if new is not target:
                target.add_(new)
            if i < self._final:
                sent.append(self._send(target))
            if i + AHEAD < len(arrivals):
                received.append(self._receive(arrivals[i + AHEAD]))
        for wait in sent:
            wait()


def reduce_scatter(
    parts: Sequence[Tensor],
    group: Group,
    messages: Messages,
    scratch: Callable[[int], Tensor],
) -> Ring:
    """Begin to sum the ranks' `parts` (1-D, one per rank), each in its owner's memory.

    The parts of others are used up. Each part is summed in ring order, starting with
    the rank after its owner, so the result does not depend on timing. `scratch` returns
    memory for so many elements, which is the ring's until it is finished.
    """

    def place(targets: Sequence[Tensor]) -> Sequence[Tensor]:
        lengths = [own.numel() for own in targets]
        longest = max(lengths, default=1)
        slots = scratch(min(AHEAD, len(targets)) * longest).view(-1, longest).unbind()
        # A slot is posted again only after it has been added: AHEAD are out at most.
        turns = zip(cycle(slots), lengths, strict=False) if slots else ()
        return [slot if n == longest else slot[:n] for slot, n in turns]

    return Ring(parts, group, messages, group.rank - 1, place)


def all_gather(parts: Sequence[Tensor], group: Group, messages: Messages) -> Ring:
    """Begin to fill everybody's `parts` (1-D, one per rank) from their owners."""
    return Ring(parts, group, messages, group.rank)


def segments(parts: Sequence[Tensor]) -> Callable[[Tensor], Sequence[Tensor]]:
    """What cuts any of `parts` into what it travels in, on all ranks alike."""
    lengths = [part.numel() for part in parts]
    size, total, width = len(parts), sum(lengths), parts[0].element_size()
    counts = {
        n: num_segments(n * width, size, n * size > UNEVEN * total) for n in {*lengths}
    }

    def cut(part: Tensor) -> Sequence[Tensor]:
        n = part.numel()
        if counts[n] > 1:
            return part.tensor_split(counts[n])
        return (part,) if n else ()

    return cut


def carried(total: float, largest: float, smallest: float, size: int) -> float:
    """Bytes that a link passes while a ring over parts of these bytes is at work.

    These are all parts but one. But a part that is larger than the others arrives at
    its last rank after `size` - 1 hops, one segment behind the other, and not earlier.
    """
    uneven = largest * size > UNEVEN * total
    pieces = num_segments(math.ceil(largest), size, uneven)
    return max(total - smallest, largest * (1 + (size - 2) / pieces))


def num_segments(nbytes: int, size: int, uneven: bool) -> int:
    """Into how many segments a part of so many bytes is cut among `size` ranks.

    `uneven`: it is much larger than the others, see [Note: uneven parts].
    """
    count = max(1, min(SEGMENTS, nbytes // SMALLEST), -(-nbytes // LARGEST))
    return max(count, min(HOPS * size, nbytes // FINE)) if uneven else count
