"""Measuring in a running job: all ranks get the same numbers, and they are sensible."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks

from gradtide.core.ops import AllToAll, Broadcast, Group, Op, ReduceScatter, Swap
from gradtide.planner.measure import Row, _shared, link, measure
from gradtide.planner.measuring.bench import Bench
from gradtide.planner.measuring.fit import Point
from gradtide.planner.measuring.request_timing import shape
from gradtide.planner.network import Link, Network, Rate, load
from gradtide.selectors import SELECTORS
from gradtide.transport import connect

pytestmark = pytest.mark.alone


def _measure() -> Network:
    transport = connect(None, torch.device("cpu"))
    try:
        return measure(transport, 0.5, torch.device("cpu"))
    finally:
        transport.close()


def test_all_ranks_get_the_same_network(tmp_path: Path) -> None:
    first, second = run_ranks(2, _measure)
    assert first == second
    assert (first.hosts, first.ranks_per_host, first.rate) == (2, 1, None)
    for rate in (first.inter.ring, first.inter.direct, first.inter.swap):
        assert rate.alpha + rate.beta > 0
    assert first.inter.broadcast == first.inter.swap
    assert set(first.device.select) == {s.__name__ for s in SELECTORS}
    device = first.device
    for line in (
        device.take_in,
        device.scatter,
        device.nearby,
        device.sort,
        device.optimizer,
    ):
        assert line(1e6) > 0
    assert first.device.request > 0
    assert first.interference >= 1
    assert 1 <= first.sharing <= 2
    assert first.processors == (len(os.sched_getaffinity(0)) / 2)
    assert 0.5 <= first.occupancy <= 1
    assert all(r.processor(1e6) > 0 for r in (first.inter.ring, first.inter.direct))
    first.save(tmp_path / "network.json")
    assert load(tmp_path / "network.json") == first


def test_shared() -> None:
    """Two ranks on one machine of four processors, and one on a machine with one."""
    machines = [("a", 4), ("b", 1), ("a", 4)]
    assert _shared(machines) == 1
    assert _shared([*machines, ("b", 1)]) == 0.5


class Four:
    """A transport that is not used."""

    group = Group(0, 4)


@pytest.mark.parametrize(
    ("op", "starts", "carried"),
    [
        (lambda x: ReduceScatter(x), 3, 3e6),
        (lambda x: AllToAll(x, [250_000] * 4, [250_000] * 4), 3, 3e6),
        (lambda x: Swap(x, 3), 1, 4e6),
        (lambda x: Broadcast(x, 0), 2, 8e6),
    ],
)
def test_the_model_that_is_fitted_is_that_of_costs(
    op: object, starts: float, carried: float
) -> None:
    bench = Bench(Four(), torch.device("cpu"))  # type: ignore[arg-type]
    made: Op = op(torch.zeros(1_000_000))  # type: ignore[operator]
    charged = shape(made, bench, Network(4, 1, Link.of(0.0, 0.0)))
    assert charged == pytest.approx((starts, carried))


def test_a_link_from_rows() -> None:
    point = Point("x", 1, 1.0, 1.0, 1.0)
    rows = [
        Row(field, Rate(alpha, 2.0, 0.1), (point,))
        for field, alpha in (("ring", 1.0), ("direct", 3.0), ("swap", 4.0), ("", 9.0))
    ]
    found = link(rows)
    assert (found.ring.alpha, found.direct.alpha, found.swap.alpha) == (1.0, 3.0, 4.0)
    assert found.broadcast == found.swap
