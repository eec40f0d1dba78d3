"""Ring reduce-scatter and all-gather from point-to-point messages.

Gloo's own reduce-scatter moves the bytes of an all-reduce, and its all-gather falls 20 %
short of a 1 Gb/s link among 8 hosts; these two move (P - 1) / P of the buffer each.

[Note: segments] Every part travels in segments, and a segment leaves as soon as it has been
added, while the next one is still arriving: the wire is idle for one segment's addition per
ring, not for one part's addition per step. A segment is also added while it is in cache.

[Note: posted receives] Gloo sends no byte before the receiver has named its memory. Some
receives are therefore posted ahead, so that no segment waits for a round trip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from torch import Tensor

from gradtide.ops import Group

SEGMENTS = 4  # of a part, at the least: more => the addition hides better
SMALLEST = 1 << 18  # bytes: a message costs about 50 us of Python
LARGEST = 1 << 20  # bytes: what is added should still be in cache
AHEAD = 6  # receives posted before they are needed


class Work(Protocol):
    def wait(self) -> object: ...


class Messages(Protocol):
    """Point-to-point messages, in order for each pair of ranks."""

    def send(self, tensor: Tensor, peer: int) -> Work: ...
    def receive(self, tensor: Tensor, peer: int) -> Work: ...
    def scratch(self, like: Tensor, numel: int) -> Tensor:
        """Memory of `like`'s dtype until the next call."""
        ...


def reduce_scatter(parts: Sequence[Tensor], group: Group, messages: Messages) -> Tensor:
    """Sum the ranks' `parts` (1-D, one per rank); returns this rank's, in its own memory.

    The other parts are used up. Each part is summed in ring order, starting with the rank
    after its owner, so the result does not depend on timing.
    """
    rank, size = group
    before, after = (rank - 1) % size, (rank + 1) % size
    steps = [segments(parts[(rank - 2 - step) % size]) for step in range(size - 1)]
    targets = [own for step in steps for own in step]
    final = len(targets) - len(steps[-1])  # from here on, sums are this rank's own
    longest = max((own.numel() for own in targets), default=0)
    slots = messages.scratch(parts[0], AHEAD * longest).split(longest or 1)

    def post() -> Iterator[tuple[Work, Tensor]]:
        for i, own in enumerate(targets):
            new = slots[i % AHEAD][: own.numel()]
            yield messages.receive(new, before), new

    receives = post()
    coming = deque(islice(receives, AHEAD))
    sent = [messages.send(s, after) for s in segments(parts[before])]
    for i, own in enumerate(targets):
        work, new = coming.popleft()
        work.wait()
        own.add_(new)
        if i < final:
            sent.append(messages.send(own, after))
        coming.extend(islice(receives, 1))  # into the slot that was just added
    for work in sent:
        work.wait()
    return parts[rank]


def all_gather(parts: Sequence[Tensor], group: Group, messages: Messages) -> None:
    """Fill everybody's `parts` (1-D, one per rank) from their owners; in place."""
    rank, size = group
    before, after = (rank - 1) % size, (rank + 1) % size
    steps = [segments(parts[(rank - 1 - step) % size]) for step in range(size - 1)]
    targets = [segment for step in steps for segment in step]
    final = len(targets) - len(steps[-1])  # the next rank owns what comes last
    receives = (messages.receive(segment, before) for segment in targets)
    coming = deque(islice(receives, AHEAD))
    sent = [messages.send(s, after) for s in segments(parts[rank])]
    for i, segment in enumerate(targets):
        coming.popleft().wait()
        if i < final:
            sent.append(messages.send(segment, after))
        coming.extend(islice(receives, 1))
    for work in sent:
        work.wait()


def segments(part: Tensor) -> Sequence[Tensor]:
    """The pieces that a part travels in; the same for equal lengths on every rank."""
    if part.numel() == 0:
        return ()
    nbytes = part.numel() * part.element_size()
    count = max(1, min(SEGMENTS, nbytes // SMALLEST), -(-nbytes // LARGEST))
    return part.tensor_split(count)
