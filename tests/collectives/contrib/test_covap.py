"""COVAP: a part in every step, in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradtide.collectives import COVAP, Warmup
from gradtide.collectives.levels import TwoLevel
from gradtide.core.ops import Group, payload_bytes
from gradtide.core.payload import Payload
from gradtide.planner.rehearsal import rehearsal
from gradtide.scheme import parse
from gradtide.testing import check_law, lockstep
from gradtide.wire import WIRES


@pytest.mark.pairs(
    wire=[None, *WIRES],
    size=[2, 3, 8],
    case=["turns", "more turns than parts", "levels"],
)
def test_law_on_every_wire(wire: Any, size: int, case: str) -> None:
    if case == "turns":
        check_law(COVAP(3, wire), size, numel=333 * size, steps=7)
    elif case == "levels":
        check_law(TwoLevel(COVAP(3, wire), 2), 2 * size, numel=400 * size, steps=4)
    else:
        check_law(COVAP(7, wire), size, numel=3 * size, steps=8)


@pytest.mark.parametrize("interval", [2, 3, 5])
def test_every_part_has_its_turn_and_nothing_waits_longer(interval: int) -> None:
    size, units = 3, 40
    flats = [torch.zeros(units * size, dtype=torch.float64) for _ in range(size)]
    loads = [Payload(flat, [flat]) for flat in flats]
    arrived = torch.zeros(units * size, dtype=torch.float64)
    for step in range(3 * interval):
        for rank, flat in enumerate(flats):
            flat += rank + 1
        collective = COVAP(interval)
        flows = [collective.reduce(p, Group(r, size)) for r, p in enumerate(loads)]
        mean = lockstep(flows)[0]
        turn = step % interval
        there = torch.zeros(units * size, dtype=torch.bool)
        there[size * (units * turn // interval) : size * (units * (turn + 1) // interval)] = True  # fmt: skip # noqa: E501
        assert torch.equal(mean != 0, there)
        arrived += mean
        waited = 2 * (step + 1) - arrived  # two is the mean of a step
        assert waited.min() >= 0
        assert waited.max() <= 2 * (interval - 1)


def test_bytes_are_a_share_of_the_dense_ones_and_planned() -> None:
    size, n = 4, 4 * 4096
    for wire, nbytes in ((None, 4.0), ("int8", 1 + 4 / 256)):
        collective = COVAP(4, wire)
        traffic = check_law(
            collective, size, numel=n, steps=8, dtype=torch.float32, tolerance=1e-5
        )
        traffic.pop("rounds")
        sent = sum(traffic.values()) / size / 8
        assert sent == 2 * 3 / 4 * n / 4 * nbytes
        found = rehearsal.scripts(collective, n, torch.float32, (), size)
        asked = [op for act in found[1].acts for op in act.asked]
        assert sum(payload_bytes(op, Group(0, size)) for op in asked) == sent


def test_one_step_is_dense_and_others_are_refused() -> None:
    traffic = check_law(COVAP(1), 2, numel=200, steps=1)
    assert traffic["Mean"] == 2 * 200 * 8
    check_law(Warmup(COVAP(3), 2), 3, steps=6)
    assert parse("covap(8, warmup=10)").collective == Warmup(COVAP(8), 10)
    with pytest.raises(ValueError, match="COVAP"):
        COVAP(0)
    with pytest.raises(ValueError, match="COVAP"):
        COVAP(wire="int7")  # type: ignore[arg-type]
