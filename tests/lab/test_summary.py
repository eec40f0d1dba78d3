"""Breakdown, medians and limits from measurements made up by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.lab.samples import APPLIED, STEP, row
from torch import nn

from gradtide.core.schedule import DEAR, WFBP, Schedule
from gradtide.kfac.stages import Stages
from gradtide.lab.contestants import Contestant
from gradtide.lab.spec import Spec
from gradtide.lab.summary import (
    computing,
    parts,
    summarise,
    typical,
    with_speedups,
)
from gradtide.lab.trial import Mark, Step, Trial
from gradtide.lab.workloads.workload import Timing
from gradtide.replica import Replica
from gradtide.scheme import parse

SPEC = Spec(("ddp",), "gpt", hosts=2, ranks_per_host=2, rate=8e6, steps=3, rounds=1)
ALONE = Timing(1.0, 2.0)


def contestant(
    schedule: Schedule, engine: object = None, model: nn.Module | None = None
) -> Contestant:
    workload: Any = SimpleNamespace(waits=None, model=model or nn.Linear(1, 1))
    scheme = replace(parse("wfbp"), schedule=schedule)
    replica = engine and SimpleNamespace(engine=engine, scheme=scheme)
    name = "wfbp" if schedule == WFBP else "dear"
    return Contestant(name, workload, nn.Identity(), cast("Replica | None", replica))


def step(*phases: float) -> Step:
    """Forward, backward and the rest of the given lengths, nothing exposed."""
    a, b, c = phases
    return Step(Mark(0, 0), Mark(a, 0), Mark(a + b, 0), Mark(a + b + c, 0))


def trial(*steps: Step, **more: Any) -> Trial:
    return Trial("it", timed=list(steps), num_steps=len(steps) + 1, **more)


def test_parts_of_a_step_sum_to_it() -> None:
    found = parts(STEP, APPLIED)
    assert found == pytest.approx((7.0, 4 - 1.5 - 0.5, 2.0, 2.0, 0.5 + 0.5))
    assert sum(found[1:]) == pytest.approx(found.step)


def test_steps_add_up_to_the_time_that_passed() -> None:
    # Late by 2 in the first step, a rank has the others wait in the second.
    late = trial(step(1, 4, 3), step(1, 4, 1))
    others = [trial(step(1, 4, 1), step(1, 6, 1)) for _ in range(3)]
    result = summarise(SPEC, contestant(WFBP, engine=object()), [late, *others], ALONE)
    assert 2 * result.step_seconds == 8 + 6
    assert (result.step_seconds_p25, result.step_seconds_p75) == (6.75, 7.25)


def test_what_ddp_takes_beyond_computing_alone_is_exposed() -> None:
    ranks = [trial(step(1.5, 5, 1)) for _ in range(4)]
    result = summarise(SPEC, contestant(WFBP), ranks, ALONE)
    found = result.forward_seconds, result.backward_seconds, result.exposed_seconds
    assert found == (1.5, 2, 3)


def test_with_buffers_ddp_communicates_in_forward_too() -> None:
    ranks = [trial(step(1.5, 5, 1)) for _ in range(4)]
    ddp = contestant(WFBP, model=nn.BatchNorm1d(1))
    result = summarise(SPEC, ddp, ranks, ALONE)
    found = result.forward_seconds, result.backward_seconds, result.exposed_seconds
    assert found == (1, 2, 3.5)


def test_traffic_is_per_rank_and_step() -> None:
    sums = {
        "payload_bytes": 8e6,
        "gathered_bytes": 2e6,
        "interface_bytes": 9e6,
        "cpu_seconds": 6.0,
        "loss": 3.0,
    }
    ranks = [trial(step(1, 2, 1), **sums) for _ in range(4)]
    result = summarise(SPEC, contestant(DEAR, engine=object()), ranks, ALONE)
    assert result.payload_bytes == 4e6
    assert result.interface_bytes == 9e6 / 2 / 2  # two ranks share the link
    assert result.cpu_seconds == 3
    assert result.limit_seconds == pytest.approx(1 + 3)  # gather hidden, scatter not
    assert result.final_loss == 3


def test_what_does_not_apply_is_none() -> None:
    loopback, replay = replace(SPEC, rate=None), contestant(WFBP)
    cast(Any, replay.workload).waits = ALONE
    result = summarise(loopback, replay, [trial(step(1, 2, 1))], ALONE)
    assert result.limit_seconds is None
    assert result.interface_bytes is None
    assert result.final_loss is None
    assert result.speedup_over_ddp is None


def test_compute_alone_is_known_or_measured() -> None:
    replay = contestant(WFBP)
    cast(Any, replay.workload).waits = (0.5, 0.75)
    assert computing(replay, []) == (0.5, 0.75)
    ranks = [trial(step(1, 2, 3)), trial(step(1, 1, 1))]
    assert computing(contestant(WFBP), ranks) == (1, 1.5)


def test_speedups_need_ddp() -> None:
    rows = [row("wfbp", 2.0), row("ddp", 3.0)]
    assert [r.speedup_over_ddp for r in with_speedups(rows)] == [1.5, 1.0]
    assert with_speedups(rows[:1])[0].speedup_over_ddp is None


def test_the_typical_step_is_of_the_last_round() -> None:
    found = typical(trial(*(step(1, 1, n) for n in (4, 9, 1, 4, 8))), num_last=3)
    assert found == step(1, 1, 4)


def test_stages_of_kfac_are_means_over_ranks_and_steps() -> None:
    found = (Stages(1.0, 0.5, 2.0, 3.0, 4.0), Stages(3.0, 1.5, 4.0, 5.0, 6.0))
    ranks = [trial(step(1, 2, 1), stages=stages) for stages in found]
    result = summarise(SPEC, contestant(WFBP, engine=object()), ranks, ALONE)
    assert result.stages == {
        "forward_backward": pytest.approx(3 - 0.5),  # factors are computed within
        "gradient_comm": 1.0,
        "factor_comp": 0.5,
        "factor_comm": 1.5,
        "inverse_comp": 2.0,
        "inverse_comm": 2.5,
    }
