"""What has to be run in the lab for predictions.py: commands, files and durations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradtide.lab.amounts import parse_time
from gradtide.lab.rate import parse_rate
from gradtide.planner.network import Network
from gradtide.planner.virtual import simulate
from gradtide.scheme import parse
from gradtide.simulate.grid import read_trace

MEMORY = 12e9  # bytes for the contestants of one process set
TIMED = 20.0  # seconds of timed steps that are worth waiting for
STEPS = (2, 10)  # timed, at least and at most


@dataclass(frozen=True)
class Cluster:
    """A workload on so many hosts, and the files that belong to it."""

    folder: Path
    workload: str
    hosts: int
    rate: str
    local: int = 1  # ranks on each host
    delay: str = ""  # of a round trip between hosts; empty: they are near

    @property
    def short(self) -> str:
        return self.workload.removeprefix("replay:")

    @property
    def place(self) -> str:
        """Hosts, and the ranks of each where these are several."""
        return f"{self.hosts}" if self.local == 1 else f"{self.hosts}x{self.local}"

    @property
    def links(self) -> str:
        """Their rate, and how far apart hosts are where they are."""
        return f"{self.rate}_{self.delay}" if self.delay else self.rate

    @property
    def ranks(self) -> int:
        return self.hosts * self.local

    @property
    def trace(self) -> Path:
        return self.folder / f"trace_{self.short}_{self.place}.json"

    @property
    def network(self) -> Path:
        return self.folder / f"network_{self.place}x{self.links}.json"

    def measured(self, schemes: str) -> Path:
        return self.folder / f"{self.short}_{self.place}x{self.links}_{schemes}"


@dataclass(frozen=True)
class Job:
    """A command, the file that is there when it has been run, and about how long."""

    words: tuple[str, ...]
    makes: Path
    seconds: float


def jobs(cluster: Cluster, schemes: Sequence[str]) -> Iterator[Job]:
    """All that has to be run for a cluster, whether it has been or not."""
    start = 5.0 + 2.5 * cluster.ranks  # two cores import torch on every rank
    effort = ("--steps", "8", "--warmup", "3", "--ranks", str(cluster.ranks))
    words: tuple[str, ...] = ("profile", "trace", cluster.workload, *effort)
    there: tuple[str, ...] = ("--hosts", str(cluster.hosts), "--rate", cluster.rate)
    if cluster.local > 1:
        there = (*there, "--ranks-per-host", str(cluster.local))
    if cluster.delay:
        there = (*there, "--delay", cluster.delay)
    rate = parse_rate(cluster.rate)
    assert rate is not None
    budget = 60.0 if rate >= 2e8 else 120.0
    yield Job((*words, "--out", str(cluster.trace)), cluster.trace, start + 20)
    words = ("profile", "network", *there, "--seconds", f"{budget:g}")
    out = ("--out", str(cluster.network))
    yield Job((*words, *out), cluster.network, start + 1.2 * budget)

    trace = read_trace(cluster.workload)
    network = Network.ideal(cluster.hosts, cluster.local, rate)
    network = network.delayed(parse_time("--delay", cluster.delay or "0ms"))
    # Parameters, gradients, buckets and means, and what a process holds anyway.
    room = cluster.ranks * (4 * trace.nbytes + 2.5e8)
    together = max(1, int(MEMORY / room))
    for first in range(0, len(schemes), together):
        names = schemes[first : first + together]
        each = [simulate(trace, parse(name), network).step for name in names]
        timed = round(min(max(TIMED / max(each), STEPS[0]), STEPS[1]))
        warmup = 1 if max(each) > TIMED else 3
        words = ("compare", "--schemes", ",".join(names), "--workload")
        effort = ("--steps", str(timed), "--warmup", str(warmup), "--rounds", "1")
        folder = cluster.measured(_short(names))
        out = ("--out", str(folder))
        seconds = start + 1.3 * (warmup + 1 + timed) * sum(each)
        asked = (*words, cluster.workload, *there, *effort, *out)
        yield Job(asked, folder / "record.json", seconds)


def _short(names: Sequence[str]) -> str:
    """As a folder is called."""
    return re.sub(r"[^\w.+=-]+", "_", "+".join(names))[:120]
