"""The overhead of exchanges is measured in training, alike on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
from tests.ranks import run_ranks

from gradtide.lab.job import silent
from gradtide.planner.network import TYPICAL, Line, Link, Network, Rate
from gradtide.profile.network import overhead
from gradtide.profile.network.overhead import made, with_overhead

RATE = Rate(1e-4, 1e-9, 0.0, Line(1e-4, 1e-9))
THERE = Network(
    2, 1, Link(RATE, RATE, RATE, RATE), device=TYPICAL, processors=0.5, occupancy=0.1
)


def test_ranks_agree_and_factors_are_sane() -> None:
    def run() -> Network:
        return with_overhead(THERE, silent, turns=1)

    first, second = run_ranks(2, run)
    assert first == second
    found = first.device.overhead
    assert set(found) == {"TopK", "TopKA2A", "OkTopk"}
    assert all(overhead.LEAST <= f <= overhead.MOST for f in found.values())
    assert THERE.occupancy < first.occupancy <= 1.0
    assert replace(first, device=TYPICAL, occupancy=0.1) == THERE


def test_nothing_is_measured_where_processors_are_enough() -> None:
    plenty = replace(THERE, processors=1.0)
    assert with_overhead(plenty, silent) is plenty
    unknown = replace(THERE, processors=None)
    assert with_overhead(unknown, silent) is unknown


def test_slow_links_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Network:
        monkeypatch.setattr(overhead, "LONGEST", 1e-6)
        return with_overhead(THERE, silent, turns=1)

    assert not run_ranks(2, run)[0].device.overhead


def test_gradients_are_partly_alike() -> None:
    def run() -> list[float]:
        (gradient, *_) = made(dist.get_rank(), 1).gradients(0)
        return [gradient[:1000].sign().sum().item()]

    first, second = run_ranks(2, run)
    assert first != [0.0]
    assert first == second  # a rank's own noise is squared
