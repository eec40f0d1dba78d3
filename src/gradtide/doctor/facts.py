"""What a rank knows of itself, from versions to addresses; which ranks share a host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from gradtide.core.grouped import grouped
from gradtide.lab.place import Place
from gradtide.lab.record import versions
from gradtide.planner.measure import machine
from gradtide.transport.addresses import chosen, interfaces, public
from gradtide.transport.hosts import host_name, network
from gradtide.transport.stream import governed

SHARED = "/dev/shm"
# What decides how the ranks of a job talk; it has to be the same for all.
ALIKE = (
    "GLOO_DEVICE_TRANSPORT",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "TORCH_GLOO_LAZY_INIT",
)


@dataclass(frozen=True)
class Facts:
    """One rank's; all of it is known without asking another."""

    rank: int
    size: int  # the number of ranks, as this one was told
    local_size: int | None
    host: str  # what is the same for ranks that average among themselves first
    network: str  # and for those that reach each other without a network card
    machine: str  # what is the same for ranks that share processors
    name: str
    address: str  # at which Gloo listens
    interface: str
    why: str
    error: str  # why there is no address
    interfaces: dict[str, str]
    public: dict[str, str]  # interfaces by the addresses that are of no private network
    versions: dict[str, str]
    cores: int
    threads: int
    omp: str  # OMP_NUM_THREADS
    files: int | None  # that this process may open; None: not known, or no limit
    shared: int | None  # bytes of shared memory, by which loaders pass batches on
    governed: bool  # it may have its connections be governed by BBR
    gpus: int
    backend: str  # that init_process_group() would take
    variables: dict[str, str]


def facts(place: Place | None) -> Facts:
    """This process's; as the one rank there is, where no launcher has started it."""
    there = interfaces()
    shared, cores = machine()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Facts(
        rank=place.rank if place else 0,
        size=place.size if place else 1,
        local_size=place.local_size if place else None,
        host=host_name(),
        network=network(),
        machine=shared,
        name=socket.gethostname(),
        **vars(chosen(there)),
        interfaces=there,
        public=public(there),
        versions=versions(),
        cores=cores,
        threads=torch.get_num_threads(),
        omp=os.environ.get("OMP_NUM_THREADS", ""),
        files=_files(),
        shared=_shared(),
        governed=governed(),
        gpus=gpus,
        backend="nccl" if gpus and dist.is_nccl_available() else "gloo",
        variables={name: os.environ[name] for name in ALIKE if name in os.environ},
    )


def _files() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _shared() -> int | None:
    if not Path(SHARED).is_dir():
        return None
    found = os.statvfs(SHARED)
    return found.f_blocks * found.f_frsize


# - Who shares a host, and who has what, in words --------------------------------------


@dataclass(frozen=True)
class Host:
    """The ranks that share a network, by the number of the host."""

    number: int
    name: str
    ranks: tuple[int, ...]

    @property
    def head(self) -> int:
        return self.ranks[0]

    def __str__(self) -> str:
        return f"host {self.number} ({self.name})"


def hosts(everybody: Sequence[Facts]) -> list[Host]:
    """The hosts, in the order of their first ranks."""
    return [
        Host(i, own[0].name, tuple(each.rank for each in own))
        for i, own in enumerate(grouped(everybody, lambda each: each.host).values())
    ]


def parted(found: Mapping[str, Sequence[Facts]]) -> str:
    """Who has what, in a line."""
    return "; ".join(
        f"{value} on {ranks_of([each.rank for each in own])}"
        for value, own in found.items()
    )


def ranks_of(ranks: Sequence[int]) -> str:
    """Ranks in a few words: rank 3, or ranks 0-3, 8."""
    runs = []
    for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0]):
        own = [rank for _, rank in run]
        runs.append(f"{own[0]}-{own[-1]}" if len(own) > 2 else ", ".join(map(str, own)))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"
