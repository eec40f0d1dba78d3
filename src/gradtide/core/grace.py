"""For how long ranks that have come to the end of a round wait for others.

In rounds a rank that is slow has all others wait for it, where something leaves. With a
grace they ask it, after so many seconds, to end its round: what it has done by then
leaves with what they have done, and it goes on with them in the next round.

[Note: which round] Who asks, and who is asked, may be at different exchanges: a word
travels. So exchanges are counted, alike on every rank, and a word is of one of them.
What comes late, of an exchange that is over, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Grace(Protocol):
    """Asks ranks that are slower to end their round, or is asked.

    Attributes:
        seconds: For which others are waited for.
    """

    seconds: float

    @property
    def asked(self) -> int | None:
        """The position in the round that others wait at for this rank, if they do."""

    def waiting(
        self, position: int, idle: Callable[[], bool]
    ) -> AbstractContextManager[None]:
        """Inside, this rank waits for the others, at a position of the round.

        `idle`, which another thread calls, says whether it waits for nothing else. When
        the wait is over, all ranks go on to their next exchange.
        """
