"""Costs are the formulas of the textbook where they apply, and NICs are shared."""

from __future__ import annotations

import pytest
import torch

from gradtide.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Broadcast,
    Cut,
    Group,
    Mean,
    Op,
    ReduceScatter,
    Swap,
    ToHost,
)
from gradtide.planner.clock.cost import hops, seconds
from gradtide.planner.network import Link, Network, Rate

A, B = 1e-4, 1e-8


def flat(hosts: int, **more: int) -> Network:
    return Network(hosts, 1, Link.of(A, B), **more)


def two_level(hosts: int, local: int) -> Network:
    return Network(hosts, local, Link.of(A, B), Link.of(A / 10, B / 100))


def floats(n: int) -> torch.Tensor:
    return torch.empty(n, device="meta")


def direct(n: int, size: int) -> AllToAll:
    return AllToAll(floats(n * size), [n] * size, [n] * size)


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_flat_requests_cost_what_the_textbook_says(size: int) -> None:
    net, group, n = flat(size, one_hop_ranks=0), Group(0, size), 1000
    steps, part = size - 1, 4 * n * B
    for op in (ReduceScatter(floats(n * size)), AllGather(floats(n)), direct(n, size)):
        assert seconds(op, group, net) == pytest.approx(steps * (A + part))
    whole = AllReduce(floats(n * size))
    assert seconds(whole, group, net) == pytest.approx(2 * steps * (A + part))
    assert seconds(Swap(floats(n), 1), group, net) == pytest.approx(A + part)
    rounds = (size - 1).bit_length()
    tree = seconds(Broadcast(floats(n), 0), group, net)
    assert tree == pytest.approx(rounds * (A + part))


@pytest.mark.parametrize("op", [ToHost(floats(4)), Cut(floats(4)), Swap(floats(4), 0)])
def test_what_does_not_travel_is_free(op: Op) -> None:
    assert seconds(op, Group(0, 4), flat(4)) == 0


def test_one_rank_asks_nobody() -> None:
    assert seconds(AllReduce(floats(9)), Group(0, 1), flat(1)) == 0


def test_a_ring_crosses_every_card_once_whatever_the_ranks_behind_it() -> None:
    n = 32 * 10**6
    ring = seconds(AllGather(floats(n // 32)), Group(0, 32), two_level(8, 4))
    assert ring == pytest.approx(4 * n * 31 / 32 * B, rel=0.01)
    # The starts: 8 of the 32 hops are between hosts.
    small = two_level(8, 4)
    latency = seconds(AllGather(floats(40000)), Group(0, 32), small) - 31 * 160000 * B
    assert latency == pytest.approx(31 / 4 * A + 31 * 3 / 4 * A / 10)


@pytest.mark.parametrize("rank", [0, 3, 31])
def test_direct_messages_share_their_card(rank: int) -> None:
    """4 k (P - 4) / P leave a host of 4 ranks."""
    n = 10**6
    took = seconds(direct(n // 32, 32), Group(rank, 32), two_level(8, 4))
    starts = 28 * A + 3 * A / 10
    assert took - starts == pytest.approx(4 * 4 * n * 28 / 32 * B)


def test_direct_messages_within_a_host_do_not() -> None:
    net, n = two_level(1, 4), 1000
    took = seconds(direct(n, 4), Group(0, 4), net)
    assert took == pytest.approx(3 * (A / 10 + 4 * n * B / 100))


def test_swaps_share_their_card_only_between_hosts() -> None:
    net, x = two_level(2, 4), floats(1000)
    near, far = (seconds(Swap(x, peer), Group(0, 8), net) for peer in (1, 4))
    assert near == pytest.approx(A / 10 + 4000 * B / 100)
    assert far == pytest.approx(A + 4 * 4000 * B)


def test_short_parts_take_one_hop_among_few() -> None:
    rates = (Rate(A, B), Rate(A / 50, B), Rate(A, B), Rate(A, B))
    net = Network(8, 1, Link(*rates))
    short = seconds(AllGather(floats(1 << 15)), Group(0, 8), net)
    assert short == pytest.approx(7 * (A / 50 + (1 << 17) * B))
    longer = seconds(AllGather(floats((1 << 15) + 1)), Group(0, 8), net)
    assert longer == pytest.approx(7 * (A + ((1 << 17) + 4) * B))
    small = seconds(AllReduce(floats(16)), Group(0, 8), net)
    assert small == pytest.approx(7 * (A / 50 + 64 * B))


def test_a_larger_part_arrives_at_its_last_rank_after_all_hops() -> None:
    net = Network(8, 1, Link.of(0, B), one_hop_ranks=0)
    even = seconds(AllGather(floats(0), [1000] * 8), Group(0, 8), net)
    uneven = seconds(AllGather(floats(0), [8000] + [0] * 7), Group(0, 8), net)
    assert uneven > 4 * even  # one message of all goes seven hops
    nearly = seconds(AllGather(floats(0), [1001] + [999] * 7), Group(0, 8), net)
    assert nearly == pytest.approx(even, rel=0.01)


def test_the_longer_way_decides_in_an_uneven_exchange() -> None:
    group, net = Group(0, 4), flat(4)
    op = AllToAll(floats(300), [0, 100, 100, 100], [0, 0, 0, 10**6])
    assert seconds(op, group, net) == pytest.approx(A + 4e6 * B)


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_hops_of_requests_among_far_ranks(size: int) -> None:
    group, small, large = Group(0, size), floats(100 * size), floats(10**6 * size)
    for x in (small, large):
        one: list[Op] = [ReduceScatter(x), AllGather(x), Swap(x, 1)]
        one += [
            direct(len(x), size),
            AllToAll(x, [0, len(x)] + [0] * (size - 2), [0] * size),
        ]
        assert [hops(op, group) for op in one] == [1] * len(one)
        assert hops(Mean(x), group) == 2
        assert hops(Broadcast(x, 0), group) == 1
    assert hops(AllReduce(small), group) == 1
    assert hops(AllReduce(large), group) == 2
    for nothing in (ToHost(small), Cut(small), Swap(small, 0)):
        assert hops(nothing, group) == 0
    assert hops(Mean(large), Group(0, 1)) == 0


def test_hops_among_some_are_those_between_hosts() -> None:
    group, x = Group(0, 8), floats(10**6)
    assert hops(Among(AllReduce(x), range(4)), group) == 2
    assert hops(Among(AllReduce(x), range(4), inside=True), group) == 0
