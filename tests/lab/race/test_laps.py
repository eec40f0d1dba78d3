"""Laps on real ranks: whose turn it is, what is counted, and when it is over."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn

from gradtide.lab.race import laps
from gradtide.lab.race.standings import Point
from gradtide.lab.spec import RaceSpec
from gradtide.lab.workloads import Workload, build

SPEC = RaceSpec(("ddp", "dear"), "digits", 2, 1, None, 1e-9, every=3)


def raced(spec: RaceSpec, told: list[str]) -> dict[str, list[Point]] | None:
    """Run a race in the group that is there."""
    torch.set_num_threads(1)
    with (
        patch("torch.distributed.init_process_group"),
        patch("torch.distributed.destroy_process_group"),
    ):
        return laps.run(spec, told.append)


def once() -> tuple[dict[str, list[Point]] | None, list[str]]:
    told: list[str] = []
    return raced(SPEC, told), told


def test_everybody_trains_at_least_once_and_rank_0_has_the_courses() -> None:
    (courses, told), (elsewhere, untold) = run_ranks(2, once)
    assert elsewhere is None
    assert untold == []
    assert [words.split()[1] for words in told] == ["ddp", "dear"]
    for start, end in courses.values():
        assert (start.seconds, start.steps, start.sent_bytes) == (0, 0, 0)
        assert end.steps == 3
        assert end.seconds > 0
    # The same model, the same data and the same mean: the same course.
    ddp, dear = courses.values()
    assert [p.loss for p in dear] == pytest.approx([p.loss for p in ddp], rel=1e-4)
    # What is sent to begin with the same parameters is nobody's.
    assert dear[-1].sent_bytes == pytest.approx(ddp[-1].sent_bytes, rel=0.05)


def slowly() -> list[str]:
    """A race of 1.5 s in which every lap of `dear` takes 0.6 s longer."""
    told: list[str] = []
    steps = laps.Runner.steps

    def late(self: laps.Runner, count: int) -> object:
        time.sleep(0.6 if self.contestant.name == "dear" else 0.0)
        if os.environ["RANK"] == "1":  # whose clock nobody asks
            time.sleep(0.01)
        return steps(self, count)

    with patch.object(laps.Runner, "steps", late):
        spec = RaceSpec(("ddp", "dear"), "digits", 2, 1, None, 1.5, every=3)
        raced(spec, told)
    return told


def test_the_next_lap_is_of_who_has_trained_for_the_shortest_time() -> None:
    told, _ = run_ranks(2, slowly)
    names = [words.split()[1] for words in told]
    assert names[0] == "ddp"
    assert 2 <= names.count("dear") <= 3
    assert names.count("ddp") > 2 * names.count("dear")
    assert float(told[-1].split()[0]) == 3.0  # both had all of their time


def test_the_rate_stays_after_its_warm_up() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = laps.warm_up(optimizer)
    rates = []
    for _ in range(1000):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(1 / laps.WARM_UP_STEPS)
    assert set(rates[laps.WARM_UP_STEPS - 1 :]) == {1.0}


@pytest.mark.parametrize(("name", "has"), [("gpt-small", True), ("digits", False)])
def test_only_a_workload_with_a_schedule_gets_one(name: str, has: bool) -> None:
    workload: Workload = build(name, rank=0, size=2)
    assert (laps.steady(workload).scheduler is laps.warm_up) is has
    assert laps.steady(workload).model is workload.model
