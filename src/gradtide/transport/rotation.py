"""All in one hop: point-to-point messages, one sender at a time for each receiver.

In round i every rank sends to the i-th rank after it, so every link carries one message
in each direction. Were all sent at once, they would share links as TCP sees fit, and
some links would be idle at the end.

[Note: pacing] Nobody waits for a round to end: the next message is posted when the last
byte of the one before is in the socket's buffer. All receives are posted first, because
Gloo tells a sender that memory is ready over the connection that carries data the other
way: told later, it would queue behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradtide.core.ops import Group
from gradtide.transport.ring import Messages


class Rotation:
    """An all-to-all that has begun; `finish` once, in the order of beginning.

    `leaving` and `arriving` hold a contiguous tensor for and from every rank, some of
    them empty; this rank's own are left alone.
    """

    def __init__(
        self,
        group: Group,
        messages: Messages,
        leaving: Sequence[Tensor],
        arriving: Sequence[Tensor],
        after: Callable[[], object] | None = None,
    ) -> None:
        rank, size = group
        self._after = after
        sources = [(rank - i) % size for i in range(1, size)]
        targets = [(rank + i) % size for i in range(1, size)]
        self._received = [
            messages.receive(arriving[peer], peer)
            for peer in sources
            if arriving[peer].numel()
        ]
        self._sends = (
            messages.send(leaving[peer], peer)
            for peer in targets
            if leaving[peer].numel()
        )
        self._sending = next(self._sends, None)

    def finish(self, drained: Callable[[], None]) -> None:
        """Wait for all messages; `drained` is called when all has been posted."""
        while self._sending is not None:
            self._sending()
            self._sending = next(self._sends, None)
        for wait in self._received:
            drained()
            wait()
        if self._after is not None:
            self._after()


def reduce_scatter(
    parts: Sequence[Tensor],
    group: Group,
    messages: Messages,
    scratch: Callable[[int], Tensor],
) -> Rotation:
    """As `ring.reduce_scatter`, bit for bit."""
    rank, size = group
    own = parts[rank]
    arriving = scratch(size * own.numel()).view(size, own.numel()).unbind()

    def add() -> None:
        # From the rank after this one around to this one, as the ring does.
        first, *others = (arriving[(rank + i) % size] for i in range(1, size))
        for row in others:
            first.add_(row)
        own.add_(first)

    return Rotation(group, messages, parts, arriving, add)


def all_gather(parts: Sequence[Tensor], group: Group, messages: Messages) -> Rotation:
    """As `ring.all_gather`."""
    return Rotation(group, messages, [parts[group.rank]] * group.size, parts)
