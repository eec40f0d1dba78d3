"""Which ranks share a host, and who has what, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from gradtide.doctor.facts import Facts


@dataclass(frozen=True)
class Host:
    """The ranks that share a network, by the number of the host."""

    number: int
    name: str
    ranks: tuple[int, ...]

    @property
    def head(self) -> int:
        return self.ranks[0]

    def __str__(self) -> str:
        return f"host {self.number} ({self.name})"


def hosts(everybody: Sequence[Facts]) -> list[Host]:
    """The hosts, in the order of their first ranks."""
    return [
        Host(i, own[0].name, tuple(each.rank for each in own))
        for i, own in enumerate(by(everybody, lambda each: each.host).values())
    ]


def by(
    everybody: Iterable[Facts], key: Callable[[Facts], str]
) -> dict[str, list[Facts]]:
    """Facts by what `key` says of them, in the order of ranks."""
    found: dict[str, list[Facts]] = {}
    for each in everybody:
        found.setdefault(key(each), []).append(each)
    return found


def parted(found: Mapping[str, Sequence[Facts]]) -> str:
    """Who has what, in a line."""
    return "; ".join(
        f"{value} on {ranks_of([each.rank for each in own])}"
        for value, own in found.items()
    )


def ranks_of(ranks: Sequence[int]) -> str:
    """Ranks in a few words: rank 3, or ranks 0-3, 8."""
    runs = []
    for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0]):
        own = [rank for _, rank in run]
        runs.append(f"{own[0]}-{own[-1]}" if len(own) > 2 else ", ".join(map(str, own)))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"
