"""All in one hop, one sender at a time for each receiver.

In round i every rank sends to the i-th rank after it, so every link carries one message
in each direction. Were all sent at once, they would share links as TCP sees fit, and
some links would be idle at the end. Nobody waits for a round to end: the next message
follows when the last byte of the one before is in the socket's buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from gradtide.transport.links import Peers, Transfer, arrival, memory_of


def all_to_all(
    leaving: Sequence[Tensor],
    arriving: Sequence[Tensor],
    peers: Peers,
    after: Callable[[], object] = lambda: None,
    short: bool = False,
) -> Transfer:
    """Begin to send to every rank, and to fill what is to come from it.

    `leaving` and `arriving` hold a contiguous tensor for and from every rank, some of
    them empty; this rank's own are left alone. If messages may be `short`, what arrives
    fills no more than its place.
    """
    (rank, size), track, ranks = peers
    targets = [(rank + i) % size for i in range(1, size)]
    out = deque(
        (ranks[peer], memory_of(leaving[peer]))
        for peer in targets
        if leaving[peer].numel()
    )
    into = {ranks[peer]: arrival(arriving[peer], short) for peer in targets}
    return Transfer(track, out, into, after=after)


def reduce_scatter(
    parts: Sequence[Tensor], peers: Peers, number: int, divisor: int = 1
) -> Transfer:
    """As `ring.reduce_scatter`, bit for bit; `number` is that of the item's request."""
    rank, size = peers.group
    own = parts[rank]
    scratch = peers.track.scratch(("request", number), size * own.nbytes).view(
        own.dtype
    )
    arriving = scratch.view(size, own.numel()).unbind()

    def add() -> None:
        # From the rank after this one around to this one, as the ring does.
        first, *others = (arriving[(rank + i) % size] for i in range(1, size))
        for row in others:
            first.add_(row)
        own.add_(first)
        if divisor != 1:
            own.div_(divisor)

    return all_to_all(parts, arriving, peers, add)


def all_gather(parts: Sequence[Tensor], peers: Peers) -> Transfer:
    """As `ring.all_gather`."""
    rank, size = peers.group
    return all_to_all([parts[rank]] * size, parts, peers)
