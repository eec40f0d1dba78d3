"""What lies between hosts, where that is more than a switch: numbers, and no more.

Knows nothing of how they are emulated (`router`) nor of files that say so (`atlas`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from gradtide.lab.amounts import format_share, format_time
from gradtide.lab.events import Cut, Event
from gradtide.lab.rate import format_rate

QUEUE = 0.05  # seconds of a link that wait in front of it; what comes on top is lost
LONGEST = 10.0  # seconds of a round trip


@dataclass(frozen=True)
class Path:
    """From a host to another: seconds of the round trip, and what befalls packets.

    Half of `delay` is on the way there, half on the way back. `jitter` is by how much
    a round trip is longer or shorter at most; packets do not overtake each other.
    `loss` is the share of packets that is lost on the way, each way.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay <= LONGEST:
            raise ValueError(f"a delay of {self.delay:g} s: choose 0 to {LONGEST:g} s")
        if not 0 <= self.jitter <= self.delay:
            raise ValueError(
                f"a jitter of {self.jitter:g} s with a delay of {self.delay:g} s: "
                "choose at most the delay, for no packet arrives before it is sent"
            )
        if not 0 <= self.loss <= 0.5:
            raise ValueError(f"a loss of {self.loss:g}: choose 0 to 50%")

    def words(self) -> str:
        """For people."""
        found = [f"{format_time(self.delay)} apart"] if self.delay else []
        if self.jitter:
            found[0] += f" +- {format_time(self.jitter)}"
        if self.loss:
            found.append(f"{format_share(self.loss)} lost each way")
        return ", ".join(found)

    def __add__(self, other: Path) -> Path:
        """One after the other."""
        loss = 1 - (1 - self.loss) * (1 - other.loss)
        return Path(self.delay + other.delay, self.jitter + other.jitter, loss)


@dataclass(frozen=True)
class Link:
    """A host's: bits/s that reach it and that leave it, and its part of every path."""

    rate: float
    up: float | None = None  # None: as `rate`
    path: Path = Path()

    @property
    def sends(self) -> float:
        """Bits/s that leave the host."""
        return self.rate if self.up is None else self.up


@dataclass(frozen=True)
class Internet:
    """The link of each host, and the path between the links of each two of them."""

    links: tuple[Link, ...]
    between: tuple[tuple[Path, ...], ...]  # from host to host, the same both ways
    queue: float = QUEUE
    events: tuple[Event, ...] = ()  # in the order of time

    def __post_init__(self) -> None:
        size = len(self.links)
        assert [len(row) for row in self.between] == [size] * size
        if not 0.001 <= self.queue <= 5:
            raise ValueError(f"a queue of {self.queue:g} s: choose 1ms to 5s")
        assert list(self.events) == sorted(self.events, key=lambda event: event.at)

    @staticmethod
    def alike(hosts: int, link: Link, path: Path, queue: float = QUEUE) -> Internet:
        """All hosts have the same link and are as far from each other."""
        return Internet((link,) * hosts, ((path,) * hosts,) * hosts, queue)

    @property
    def hosts(self) -> range:
        return range(len(self.links))

    @property
    def slowest(self) -> float:
        """Bits/s of the slowest direction of a link: what all wait for."""
        return min(min(link.rate, link.sends) for link in self.links)

    @property
    def loses(self) -> bool:
        """Whether packets are lost that no queue was too short for."""
        return any(path.loss for path in self.paths().values())

    @property
    def cut(self) -> bool:
        """Whether a link goes down."""
        return any(isinstance(event.change, Cut) for event in self.events)

    @property
    def even(self) -> bool:
        """Whether all links are alike, and all hosts as far from each other."""
        paths = {path for row in self.between for path in row}
        return len(paths) == len(set(self.links)) == 1

    def words(self) -> str:
        """For people, in a line."""
        links = {(link.rate, link.sends): None for link in self.links}
        told = [
            format_rate(down) + (f" (up {format_rate(up)})" if up != down else "")
            for down, up in links
        ]
        paths = dict.fromkeys(
            words for p in self.paths().values() if (words := p.words())
        )
        return "; ".join([f"links of {' and '.join(told)}/s", *paths])

    def told(self) -> dict[str, Any]:
        """For records, as JSON has it."""
        found = asdict(self)
        if self.even:
            link, path = found.pop("links")[0], found.pop("between")[0][0]
            found |= {"link": link, "path": path}
        for event, told in zip(self.events, found["events"], strict=True):
            told["change"]["kind"] = type(event.change).__name__.lower()
        return dict(json.loads(json.dumps(found)))

    def path(self, sender: int, receiver: int) -> Path:
        """All of the path between two hosts."""
        ends = self.links[sender].path + self.links[receiver].path
        return ends + self.between[sender][receiver]

    def paths(self) -> dict[tuple[int, int], Path]:
        """The path from each host to each other."""
        pairs = ((a, b) for a in self.hosts for b in self.hosts if a != b)
        return {(a, b): self.path(a, b) for a, b in pairs}
