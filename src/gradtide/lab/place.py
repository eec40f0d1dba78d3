"""Where this process is among the ranks, by what its launcher has set.

[Note: Slurm] torch reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. srun sets none
of them, but enough to work them out: the step's number of tasks, this task's number in
it, and the step's hosts, of which the first has task 0. A batch script has SLURM_PROCID
too, without being one of several tasks: whoever took it for rank 0 would wait for
others that nobody starts. Only steps have SLURM_STEP_NUM_TASKS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NONE = (
    "no launcher has started this process (RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT are not set): start it on all hosts, as torchrun --nnodes 2 "
    "--nproc-per-node 1 ... --no-python gradtide doctor"
)
REMEDY = "start this command with torchrun or srun, or set what is missing"
PORTS = (20000, 12000)  # of Slurm's jobs: from where on, and how many
# The first host of a list as Slurm writes them: gpu[03-07,9],login1.
FIRST = re.compile(r"(?P<stem>[^,\[]+)(?:\[(?P<number>\d+)[^\]]*\](?P<end>[^,\[]*))?")


@dataclass(frozen=True)
class Place:
    """A rank among `size`, which meet at `address`:`port`."""

    rank: int
    size: int
    address: str
    port: int
    launcher: str  # in a word, for people
    local_size: int | None = None  # ranks on this host, as the launcher says
    hosted: bool = False  # the launcher has the store, not rank 0
    attempt: str = "0"  # of the launcher's restarts


def place(environment: Mapping[str, str], remedy: str = REMEDY) -> Place | None:
    """Where this process is; None where nothing says that there are others.

    Raises ValueError, with the remedy, for an environment that no training could start
    in: something is missing, is no number, or does not fit together.
    """

    def number(name: str) -> int:
        text = given[name]
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(f"{name} is {text!r}, no number: {remedy}")
        return int(text)

    slurm = {} if {"RANK", "WORLD_SIZE"} & set(environment) else _slurm(environment)
    given = {**slurm, **environment}
    missing = [name for name in NAMES if not given.get(name)]
    if len(missing) == len(NAMES):
        return None
    if missing:
        there = ", ".join(name for name in NAMES if name not in missing)
        raise ValueError(f"{there} is set, but not {', '.join(missing)}: {remedy}")
    rank, size, port = map(number, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size} do not fit together, for "
            f"WORLD_SIZE={size} has ranks 0 to {size - 1}: {remedy}"
        )
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT={port} is no port (1 to 65535): {remedy}")
    local = "LOCAL_WORLD_SIZE"
    elastic = "TORCHELASTIC_RUN_ID" in given
    launcher = "torchrun" if elastic else "srun" if slurm else "its environment"
    local_size = number(local) if given.get(local) else None
    hosted = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = given.get("TORCHELASTIC_RESTART_COUNT", "0")
    where = rank, size, given["MASTER_ADDR"], port
    return Place(*where, launcher, local_size, hosted, attempt)


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, of a task of srun's, see [Note: Slurm]; else nothing."""
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
    if not all(environment.get(theirs) for theirs in names.values()):
        return {}
    found = {ours: environment[theirs] for ours, theirs in names.items()}
    if host := FIRST.match(environment.get("SLURM_STEP_NODELIST", "")):
        parts = (host["stem"], host["number"], host["end"])
        found["MASTER_ADDR"] = "".join(part or "" for part in parts)
    job = environment.get("SLURM_JOB_ID", "")
    if job.isascii() and job.isdecimal():
        found["MASTER_PORT"] = str(PORTS[0] + int(job) % PORTS[1])
    # Such as 2(x3),1: the first number is this host's too where all are alike.
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if alike := re.fullmatch(r"(\d+)(\(x\d+\))?", tasks):
        found["LOCAL_WORLD_SIZE"] = alike[1]
    return found
