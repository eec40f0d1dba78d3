"""Requests carried out host by host: the same answers, and less on a host's link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtide.core.levels import SHORT, Hosts, Levels, levels_of, rows
from gradtide.core.ops import (
    AllGather,
    AllReduce,
    Broadcast,
    Flow,
    Group,
    Mean,
    Op,
    ReduceScatter,
)
from gradtide.testing import lockstep

LONG = 4 * SHORT  # elements
CLUSTERS: list[tuple[int, Hosts]] = [
    (4, 2),
    (6, 2),
    (6, 3),
    (6, ((0, 2, 4), (1, 3, 5))),  # taking turns
    (8, ((0, 1), (5, 4), (2, 7), (6, 3))),
]
Ask = Callable[[int, int], Op]


def uneven(size: int) -> list[int]:
    return [LONG + 8 * (3 * rank % 5) if rank % 3 else 0 for rank in range(size)]


def numbers(rank: int, numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.float64) * (rank + 1) + rank


REQUESTS: dict[str, Ask] = {
    "sum": lambda rank, size: AllReduce(numbers(rank, LONG + 3)),
    "parts": lambda rank, size: ReduceScatter(numbers(rank, size * LONG)),
    "part of a mean": lambda rank, size: ReduceScatter(
        numbers(rank, size * LONG), mean=True
    ),
    "uneven parts": lambda rank, size: ReduceScatter(
        numbers(rank, sum(uneven(size))), uneven(size)
    ),
    "gather": lambda rank, size: AllGather(numbers(rank, LONG).view(2, -1)),
    "uneven gather": lambda rank, size: AllGather(
        numbers(rank, uneven(size)[rank]), uneven(size)
    ),
    "gather into": lambda rank, size: AllGather(
        numbers(rank, LONG), into=torch.empty(size * LONG, dtype=torch.float64)
    ),
    "broadcast": lambda rank, size: Broadcast(numbers(rank, LONG), size - 2),
    "mean": lambda rank, size: Mean(numbers(rank, LONG + 3)),
    "short": lambda rank, size: AllReduce(numbers(rank, 8)),
}


def asked(ask: Ask, size: int, hosts: Hosts | None) -> tuple[list[Tensor], float]:
    """The answers, and bytes that cross each host's link, as a mean."""

    def flow(rank: int) -> Flow:
        answer: Tensor = yield ask(rank, size)
        return answer.clone()

    def carried(rank: int) -> Flow:
        levels = levels_of(Group(rank, size), hosts)
        return flow(rank) if levels is None else levels.carried(flow(rank))

    traffic = Counter[str]()
    found = lockstep([carried(rank) for rank in range(size)], traffic)
    traffic.pop("rounds")
    return found, sum(traffic.values()) / size


@pytest.mark.parametrize(("size", "hosts"), CLUSTERS)
@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_without_levels(name: str, size: int, hosts: Hosts) -> None:
    plain, _ = asked(REQUESTS[name], size, None)
    found, _ = asked(REQUESTS[name], size, hosts)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_a_link_carries_what_one_rank_would_send() -> None:
    for name, of_one in {
        "sum": lambda hosts: 2 * (hosts - 1) / hosts,
        "broadcast": lambda hosts: (hosts - 1) / hosts,  # a mean over the hosts
    }.items():
        for hosts, local in [(2, 2), (4, 2), (2, 4)]:
            _, sent = asked(REQUESTS[name], hosts * local, local)
            nbytes = 8 * LONG
            assert sent == pytest.approx(of_one(hosts) * nbytes, rel=0.01), name


def test_what_is_short_goes_directly() -> None:
    traffic = Counter[str]()
    flows = []
    for rank in range(4):

        def flow(rank: int = rank) -> Flow:
            answer: Tensor = yield REQUESTS["short"](rank, 4)
            return answer

        flows.append(Levels(Group(rank, 4), 2).carried(flow()))
    lockstep(flows, traffic)
    assert traffic["rounds"] == 1


@pytest.mark.parametrize(
    "hosts", [3, 0, ((0, 1), (2,)), ((0, 1), (1, 2)), ((0, 1), (2, 4)), ()]
)
def test_hosts_that_cannot_be_are_refused(hosts: Any) -> None:
    with pytest.raises(ValueError, match="4"):
        rows(4, hosts)


def test_one_level_is_none() -> None:
    for hosts in (None, 1, 4, ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))):
        assert levels_of(Group(0, 4), hosts) is None
