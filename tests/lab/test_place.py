"""Where a process is among the ranks, by its environment."""

from __future__ import annotations

import pytest

from gradtide.lab.place import place

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08],old1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "12003",
}


def test_nothing_says_of_others() -> None:
    assert place({"HOME": "/root"}) is None


def test_torchrun_says_it_all() -> None:
    found = place(TORCHRUN)
    assert found is not None
    assert (found.rank, found.size, found.local_size) == (1, 4, 2)
    assert (found.address, found.port, found.hosted) == ("host0", 29500, True)
    assert found.launcher == "torchrun"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[07-08],old1", "gpu07"),
        ("gpu[7,9]", "gpu7"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]-ib", "rack1-ib"),
        ("single", "single"),
    ],
)
def test_srun_says_enough(hosts: str, first: str) -> None:
    found = place({**SRUN, "SLURM_STEP_NODELIST": hosts})
    assert found is not None
    assert (found.rank, found.size, found.local_size) == (3, 4, 2)
    assert (found.address, found.port) == (first, 20003)
    assert (found.launcher, found.hosted) == ("srun", False)


def test_what_is_set_comes_before_what_slurm_says() -> None:
    found = place({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"})
    assert found is not None
    assert (found.address, found.port) == ("10.0.0.1", 7)
    found = place({**SRUN, **TORCHRUN})
    assert found is not None
    assert (found.rank, found.launcher) == (1, "torchrun")


def test_a_batch_script_is_no_rank_of_several() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
    assert place(batch) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": ""}, "but not WORLD_SIZE: start this command with torchrun"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "but not MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "one"}, "RANK is 'one', no number"),
        ({"RANK": "4"}, "WORLD_SIZE=4 has ranks 0 to 3"),
        ({"MASTER_PORT": "70000"}, "is no port"),
        ({"LOCAL_WORLD_SIZE": "-1"}, "no number"),
    ],
)
def test_an_environment_in_which_nothing_can_start(
    changed: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        place({**TORCHRUN, **changed})
