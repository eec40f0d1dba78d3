"""Measures the network as one of the ranks that torchrun or the lab has started.

Where hosts have several ranks, the ranks of each host measure the links within, all
hosts at once; then one rank of each host measures those between, and the others wait.
Last, all ranks measure their processors together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from gradtide.kfac.costs import InverseTime, time_inverses
from gradtide.lab.cluster import Cluster
from gradtide.lab.devices import backend, check_device, own_device
from gradtide.lab.internet import Internet
from gradtide.lab.job import Tell, joined, on_every_rank, passed_on, silent
from gradtide.planner.clock.cost import FREE
from gradtide.planner.data.device import Device, Line
from gradtide.planner.measure import HURRIED, SHARES, Row, finish, measure_link
from gradtide.planner.measuring.bench import Bench
from gradtide.planner.network import Link, Network
from gradtide.profile.network.overhead import with_overhead
from gradtide.transport import connect

DIMS = (16, 64, 256, 512, 1024)  # rows of matrices
REPEATS = 5
LONGEST = 86400.0  # seconds
WITHIN = 0.3  # of the time for links: those within hosts


@dataclass(frozen=True)
class Plan:
    """The layout of the ranks, and seconds to spend; `rate` in bits/s if known."""

    hosts: int
    ranks_per_host: int
    rate: float | None = None
    seconds: float = 60.0
    device: str = "cpu"
    local_rate: float | None = None  # emulated, of what a host's ranks send each other
    internet: Internet | None = (
        None  # emulated, what lies between hosts; None: a switch
    )

    def __post_init__(self) -> None:
        if self.hosts * self.ranks_per_host < 2:
            raise ValueError("one rank has nobody to talk to: use 2 or more")
        if not 0 < self.seconds <= LONGEST:
            raise ValueError(
                f"--seconds {self.seconds}: measuring takes time, above 0 and at most "
                "a day's"
            )
        check_device(self.device)


@dataclass(frozen=True)
class Found:
    """The network, and the fits behind each of its links, by the link's name."""

    network: Network
    rows: dict[str, list[Row]]


def emulated(plan: Plan, tell: Tell = silent) -> Found:
    """Measure an emulated cluster. LabError where a rank fails."""
    place = plan.hosts, plan.ranks_per_host, plan.rate
    near, far = plan.local_rate, plan.internet
    cluster = Cluster.emulating(*place, local_rate=near, internet=far)
    return on_every_rank(
        cluster, among, plan, passed_on, tell=tell, show=lambda rank, line: None
    )


def among(plan: Plan, tell: Tell = silent) -> Found | None:
    """Measure with the ranks that have been started; None but on rank 0.

    `tell` is called on rank 0 with what comes next.
    """
    with joined(backend(plan.device)) as (rank, _):
        found = measure(plan, silent if rank else tell)
    return None if rank else found


def measure(plan: Plan, tell: Tell = silent) -> Found:
    """What the ranks of the default process group find; a collective call."""
    hosts, local = plan.hosts, plan.ranks_per_host
    # The ranks of a single host are so many hosts: the network is what joins them.
    if hosts == 1:
        hosts, local = local, 1
    device, budget = own_device(plan.device), SHARES[0] * plan.seconds
    rows: dict[str, list[Row]] = {}
    network = Network(hosts, local, FREE, rate=plan.rate)
    if local > 1:
        everyone = [list(range(h * local, (h + 1) * local)) for h in range(hosts)]
        like = Network(1, local, FREE, intra=FREE)
        intra, rows["intra"] = _between(
            everyone, like, WITHIN * budget, device, lambda what: tell(f"intra: {what}")
        )
        network, budget = replace(network, intra=intra), (1 - WITHIN) * budget
    heads = [list(range(0, hosts * local, local))]
    like = Network(hosts, 1, FREE, rate=plan.rate)
    inter, rows["inter"] = _between(heads, like, budget, device, tell)
    transport = connect(None, device)
    network = replace(network, inter=inter, delay=transport.delay)
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
    made = [dist.new_group(list(ranks)) for ranks in groups]
    for group in made:
        if isinstance(group, dist.ProcessGroup):  # one that this rank is in
            transport = connect(group, device)
            known = replace(like, delay=transport.delay)
            found = [measure_link(Bench(transport, device, tell), known, budget)]
            transport.close()
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]


def with_curvature(known: Device, device: torch.device) -> Device:
    """`known` with the times of K-FAC's inversions and products on `device`.

    Called by all ranks at once, as they share cores in training.
    """
    slow = _product(device, DIMS[-1])
    fast = _product(device, DIMS[0])
    each = slow / DIMS[-1] ** 3
    return replace(
        known,
        inverse=InverseTime.fit(time_inverses(DIMS, device)),
        product=Line(max(fast - each * DIMS[0] ** 3, 0.0), each),
    )


def _product(device: torch.device, rows: int) -> float:
    """Median seconds of a product of two square matrices."""
    a, seconds = torch.rand(rows, rows, device=device), []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])
