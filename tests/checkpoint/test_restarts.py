"""Runs that are killed and stopped: the short form of benchmarks/restarts.py."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from tests.ranks import _load_kernels

PATH = Path(__file__).parents[2] / "benchmarks" / "restarts.py"


@pytest.mark.waits
@pytest.mark.parametrize("seed", [0, 3])
def test_all_leave_after_the_same_step_and_what_they_saved_loads(seed: int) -> None:
    _load_kernels()
    program = runpy.run_path(str(PATH))
    assert not program["stopped"](seed, program["SCHEMES"])["wrong"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [2, 3])  # the latter goes on with other ranks
def test_killed_runs_end_as_if_nobody_had(seed: int) -> None:
    program = runpy.run_path(str(PATH))
    found = program["killed"](seed, program["SCHEMES"], {}, count=2, steps=150)
    assert not found["wrong"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [2, 4])  # each rank's own state counts
def test_runs_that_lose_a_hosts_folder_too(seed: int) -> None:
    program = runpy.run_path(str(PATH))
    how = {"count": 2, "steps": 150, "lost": True}
    assert not program["killed"](seed, program["SCHEMES"], {}, **how)["wrong"]
