"""Requests without memory: as of rank 0, and answers of the right shape."""

from __future__ import annotations

import pytest
import torch

from gradtide.core.ops import AllGather, AllToAll, Broadcast, Group, ReduceScatter, Swap
from gradtide.planner.clock.symbolic_requests import between, shaped, sketched


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_request_is_sketched_as_if_its_rank_were_rank_0(rank: int) -> None:
    group, x = Group(rank, 4), torch.ones(24, dtype=torch.float16)
    swap = sketched(Swap(x, peer=rank ^ 2), group)
    assert isinstance(swap, Swap)
    assert swap.peer == 2
    assert (swap.tensor.dtype, swap.tensor.device.type) == (x.dtype, "meta")
    send = [10 * ((to - rank) % 4) for to in range(4)]  # by how far away they are
    recv = [20 * ((source - rank) % 4) for source in range(4)]
    exchanged = sketched(AllToAll(torch.ones(60), send, recv), group)
    assert isinstance(exchanged, AllToAll)
    assert exchanged.send == (0, 10, 20, 30)
    assert exchanged.recv == (0, 20, 40, 60)
    told = sketched(Broadcast(x, source=3), group)
    assert isinstance(told, Broadcast)
    assert told.source == 3


def test_a_third_size_continues_in_a_straight_line() -> None:
    def asked(n: int) -> list[list[AllGather]]:
        return [[AllGather(torch.empty(n, device="meta"), (n, 2 * n))]]

    ((found,),) = between(asked(100), asked(200), weight=2.0, ratio=2.0)
    assert isinstance(found, AllGather)
    assert found.sizes == (400, 800)


def test_answers_have_the_shapes_that_were_asked_for() -> None:
    group, x = Group(1, 3), torch.ones(9)
    assert shaped(ReduceScatter(x, (2, 4, 3)), group).shape == (4,)
    assert shaped(AllGather(x[:4], (2, 4, 3)), group).shape == (9,)
    assert shaped(AllGather(x), group).shape == (3, 9)
    assert shaped(AllToAll(x[:3], (1, 1, 1), (2, 0, 5)), group).shape == (7,)
