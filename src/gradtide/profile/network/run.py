"""Measures the network as one of the ranks that torchrun or the lab has started.

Where hosts have several ranks, the ranks of each host measure the links within, all
hosts at once; then one rank of each host measures those between, and the others wait.
Last, all ranks measure their processors together.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from gradtide.lab.cluster import Cluster
from gradtide.lab.failure import LabError as LabError
from gradtide.lab.group import begin
from gradtide.lab.launch import launch
from gradtide.lab.worker import run as ending_at_once
from gradtide.plan.bench import Bench
from gradtide.plan.fit import Fit, Point
from gradtide.plan.measure import HURRIED, SHARES, Row, finish, measure_link
from gradtide.plan.network import Link, Network, load
from gradtide.profile.network.curvature import with_curvature
from gradtide.profile.network.overhead import with_overhead
from gradtide.profile.network.progress import (
    Tell,
    follow,
    passed_on,
    silent,
    without_progress,
)
from gradtide.transport import connect

FREE = Link.of(0.0, 0.0)
WITHIN = 0.3  # of the time for links: those within hosts


@dataclass(frozen=True)
class Plan:
    """The layout of the ranks, and seconds to spend; `rate` in bits/s if known."""

    hosts: int
    ranks_per_host: int
    rate: float | None = None
    seconds: float = 60.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.hosts * self.ranks_per_host < 2:
            raise ValueError("one rank has nobody to talk to: use 2 or more")
        if not self.seconds > 0:
            raise ValueError(f"--seconds {self.seconds}: measuring takes time")


@dataclass(frozen=True)
class Found:
    """The network, and the fits behind each of its links, by the link's name."""

    network: Network
    rows: dict[str, list[Row]]

    def rows_text(self) -> str:
        return json.dumps({k: [asdict(r) for r in v] for k, v in self.rows.items()})


def emulated(plan: Plan, tell: Tell = silent) -> Found:
    """Measure an emulated cluster. LabError where a rank fails."""
    with tempfile.TemporaryDirectory(prefix="gradtide-") as folder:
        network, rows = Path(folder, "network.json"), Path(folder, "rows.json")
        asked = json.dumps([asdict(plan), str(network), str(rows)])
        paths = os.pathsep.join(path for path in sys.path if path)
        with without_progress():
            launch(
                Cluster(plan.hosts, plan.ranks_per_host, plan.rate),
                [sys.executable, "-m", "gradtide.profile.network.run", asked],
                env={"PYTHONPATH": paths, "TORCH_CPP_LOG_LEVEL": "ERROR"},
                on_line=follow(tell),
            )
        return Found(load(network), _rows(rows.read_text(encoding="utf-8")))


def among(plan: Plan, tell: Tell = silent) -> Found | None:
    """Measure with the ranks that have been started; None but on rank 0.

    `tell` is called on rank 0 with what comes next.
    """
    begin("gloo" if plan.device == "cpu" else None)
    rank = dist.get_rank()
    found = measure(plan, tell if rank == 0 else silent)
    dist.destroy_process_group()
    return found if rank == 0 else None


def measure(plan: Plan, tell: Tell = silent) -> Found:
    """What the ranks of the default process group find; a collective call."""
    hosts, local = plan.hosts, plan.ranks_per_host
    device, budget = _device(plan), SHARES[0] * plan.seconds
    rows: dict[str, list[Row]] = {}
    network = Network(hosts, local, FREE, rate=plan.rate)
    if local > 1 and hosts > 1:
        everyone = [list(range(h * local, (h + 1) * local)) for h in range(hosts)]
        like = Network(1, local, FREE, intra=FREE)
        intra, rows["intra"] = _between(
            everyone, like, WITHIN * budget, device, lambda what: tell(f"intra: {what}")
        )
        network, budget = replace(network, intra=intra), (1 - WITHIN) * budget
    heads = [list(range(0, hosts * local, local if hosts > 1 else 1))]
    # The ranks of a single host are so many hosts: the network is what joins them.
    if hosts == 1:
        network = replace(network, hosts=local, ranks_per_host=1)
    like = Network(len(heads[0]), 1, FREE, rate=plan.rate)
    inter, rows["inter"] = _between(heads, like, budget, device, tell)
    transport = connect(None, device)
    network = replace(network, inter=inter)
    network = finish(Bench(transport, device, tell), network, plan.seconds)
    transport.close()
    tell("inversions and products of matrices")
    dist.barrier()
    network = replace(network, device=with_curvature(network.device, device))
    if plan.seconds >= HURRIED:
        network = with_overhead(network, tell)
    return Found(network, rows)


def _between(
    groups: Sequence[Sequence[int]],
    like: Network,
    budget: float,
    device: torch.device,
    tell: Tell,
) -> tuple[Link, list[Row]]:
    """Rank 0's group's link, while all groups measure theirs; on every rank."""
    found: list[tuple[Link, list[Row]] | None] = [None]
    # All groups are made before one measures: making one is a meeting of all ranks.
    made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    for ranks, group in made:
        if dist.get_rank() not in ranks:
            continue
        assert isinstance(group, dist.ProcessGroup)
        transport = connect(group, device)
        found = [measure_link(Bench(transport, device, tell), like, budget)]
        transport.close()
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]


def _device(plan: Plan) -> torch.device:
    device = torch.device(plan.device)
    if device.type == "cpu":
        return device
    device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device)
    return device


def _rows(text: str) -> dict[str, list[Row]]:
    def row(found: dict[str, object]) -> Row:
        points = {
            name: tuple(Point(**point) for point in found[name])  # type: ignore[attr-defined]
            for name in ("points", "dropped")
        }
        fits = {name: Fit(**found[name]) for name in ("fit", "processor")}  # type: ignore[arg-type]
        return Row(str(found["field"]), **fits, **points)  # type: ignore[arg-type]

    return {
        name: [row(each) for each in rows] for name, rows in json.loads(text).items()
    }


def _main(asked: str) -> None:
    plan, network, rows = json.loads(asked)
    found = among(Plan(**plan), passed_on)
    if found is not None:
        found.network.save(Path(network))
        Path(rows).write_text(found.rows_text(), encoding="utf-8")


if __name__ == "__main__":
    ending_at_once(lambda: _main(sys.argv[1]))
