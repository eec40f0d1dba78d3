"""What was seen of requests, waits and updates, for whoever asks where time goes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

RECORDED = 1 << 16  # entries kept: more than the lab reads at once, 16 MB at most
Interval: TypeAlias = tuple[float, float]
TOTALS = (
    "exposed_seconds",
    "exchange_seconds",
    "selected",
    "offered",
    "dense_bytes",
    "compressed_bytes",
)


class Record(NamedTuple):
    """A request that travelled: payload bytes sent, seconds of the engine's clock."""

    bucket: str
    request: str
    payload_bytes: int
    start: float
    end: float
    second: bool = False  # after the turn of its exchange
    inside: bool = False  # a host, beside what is between hosts


@dataclass
class Telemetry:
    """Intervals are seconds of the engine's clock, all others are totals."""

    records: deque[Record] = field(default_factory=lambda: deque(maxlen=RECORDED))
    # Deferred updates, and waits of the training thread for the queue.
    applied: deque[Interval] = field(default_factory=lambda: deque(maxlen=RECORDED))
    waited: deque[Interval] = field(default_factory=lambda: deque(maxlen=RECORDED))
    exposed_seconds: float = 0.0  # of all waits
    exchange_seconds: float = 0.0  # that the queue waited for answers
    select_seconds: float = 0.0  # that flows took up to their first request
    selected: int = 0  # entries taken out of buckets
    offered: int = 0  # entries in them
    dense_bytes: int = 0  # that dense exchanges of the same buckets would have sent
    compressed_bytes: int = 0  # of these, where fewer were sent
    _cleared: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def record(self, record: Record) -> None:
        """The queue has waited for the answer to a request that travelled."""
        self.records.append(record)
        self.exchange_seconds += record.end - record.start

    def wait(self, start: float, end: float) -> None:
        """The training thread has waited for the queue."""
        self.waited.append((start, end))
        self.exposed_seconds += end - start

    def exchange(self, sent: int, dense: int, selected: int, offered: int) -> None:
        """The exchange of a bucket is over (hot path).

        It has sent so many bytes, and a dense one `dense`; `selected` of the bucket's
        entries have travelled.
        """
        self.selected += selected
        self.offered += offered
        self.dense_bytes += dense
        if sent < dense:
            self.compressed_bytes += dense

    def select(self, selected: int, offered: int) -> None:
        """So many of the entries that a bucket offered have travelled."""
        self.selected += selected
        self.offered += offered

    def totals(self) -> dict[str, float]:
        """What has been added up since the engine was made; `clear` lowers none."""
        return {n: self._cleared.get(n, 0) + getattr(self, n) for n in TOTALS}

    def clear(self) -> None:
        """Forget all of it but the totals."""
        self._cleared = self.totals()
        for kept in (self.records, self.applied, self.waited):
            kept.clear()
        self.exposed_seconds = self.exchange_seconds = self.select_seconds = 0.0
        self.selected = self.offered = self.dense_bytes = self.compressed_bytes = 0
