"""Figures that several ranks measure together: the lab starts them, rank 0 tells.

[Note: One GPU] Ranks share it: the device gives each of them a slice of its time, one
after the other. Four ranks compute four times as long as one, and a kernel of NCCL that
waits for another rank's waits for its slice, too. So times are told beside what
computing takes there, and those over NCCL are no measure of NCCL.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gpu.results import Ledger, is_broken, told
from gpu.setting import Setting
from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.job import IDLE, from_everybody, on_every_rank, passed_on

GROUP = 40  # seconds: the groups' timeout
SHARED = "ranks share one GPU, which computes for one of them at a time"


class Groups(NamedTuple):
    """This rank, and the groups by which all of them can be reached."""

    rank: int
    size: int
    gloo: dist.ProcessGroup
    nccl: dist.ProcessGroup | None

    def of(self, transport: str) -> dist.ProcessGroup:
        found = self.gloo if transport == "gloo" else self.nccl
        assert found is not None, f"no group for {transport}"
        return found


def transports(setting: Setting) -> tuple[str, ...]:
    return ("gloo", "nccl") if setting.cuda else ("gloo",)


@contextmanager
def joined(setting: Setting, seconds: float = GROUP) -> Iterator[Groups]:
    """The groups of this job, and one GPU for all of its ranks.

    A failure leaves them as they are: nobody waits for the end of a rank that failed.
    """
    warnings.simplefilter("ignore")
    import_module("torch.distributed.nn.functional")  # see [Note: Pinned] of the lab
    limit = timedelta(seconds=seconds)
    if setting.cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits
        # Two ranks of one host may not have one GPU; as if on hosts of their own.
        os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ['RANK']}")
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit)
        gloo: Any = dist.new_group(backend="gloo", timeout=limit)
        groups = Groups(dist.get_rank(), dist.get_world_size(), gloo, dist.group.WORLD)
    else:
        dist.init_process_group("gloo", timeout=limit)
        world: Any = dist.group.WORLD
        groups = Groups(dist.get_rank(), dist.get_world_size(), world, None)
    yield groups
    faulthandler.dump_traceback_later(30, exit=True)
    setting.synchronize()
    time.sleep(IDLE)  # see [Note: Idle] of the lab
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def told_each(
    groups: Groups, names: Sequence[str], call: Callable[[str], Any], limit: float
) -> None:
    """Call it for each name, on every rank; rank 0's answers go to the ledger.

    What fails on a rank fails, and the others go on with the next; but for a figure
    that takes longer than `limit` seconds, and for a device that is broken.
    """
    for name in names:
        _tell(groups, name, "begin", None)
        faulthandler.dump_traceback_later(limit, exit=True)
        value, error = None, None
        try:
            value = call(name)
        except Exception as raised:  # whatever it is, it is what was found
            error = raised
        why = None if error is None else f"rank {groups.rank}: {told(error)}"
        failures = [each for each in from_everybody(why) if each is not None]
        faulthandler.cancel_dump_traceback_later()
        kind = "fail" if failures else "put"
        _tell(groups, name, kind, " / ".join(failures) if failures else value)
        if error is not None and is_broken(error):
            raise error


def _tell(groups: Groups, name: str, kind: str, value: Any) -> None:
    if groups.rank == 0:
        passed_on(json.dumps([kind, name, value]))


def measure(
    ledger: Ledger,
    cluster: Cluster,
    work: Callable[..., None],
    names: Sequence[str],
    *arguments: object,
) -> None:
    """Start ranks that call `work(names, *arguments)`, which calls `told_each`.

    Where they end early the figure that they were at has failed, and they begin anew
    with those that are left.
    """
    while left := ledger.left(names):
        begun: list[str] = []

        def heard(words: str, begun: list[str] = begun) -> None:
            kind, name, value = json.loads(words)
            if kind == "begin":
                ledger.begin(name)
                begun.append(name)
            elif kind == "put":
                ledger.put(name, value)
                begun.clear()
            else:
                ledger.fail(name, value)
                begun.clear()

        try:
            asked = work, left, *arguments
            on_every_rank(cluster, _worked, *asked, tell=heard, show=_show)
        except LabError as error:
            none = not begun and ledger.left(names) == left
            for name in left if none else begun:
                ledger.fail(name, str(error))


def _worked(work: Callable[..., None], *arguments: object) -> bool:
    """The lab wants an answer of rank 0."""
    work(*arguments)
    return True


def _show(rank: int, line: str) -> None:
    print(f"    [rank {rank}] {line}", file=sys.stderr, flush=True)
