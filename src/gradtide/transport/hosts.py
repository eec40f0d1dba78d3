"""Which ranks share a host, so that what they tell each other crosses no link."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = "/proc/self/ns/net"


def host_name() -> str:
    """What is the same for all processes that reach each other without a network card.

    These are the processes of one network namespace of one machine: containers with
    networks of their own are hosts of their own. Elsewhere than on Linux it is the name
    of the machine. What one torchrun has started (`GROUP_RANK`) is a host in any case.
    """
    try:
        place = f"{BOOT.read_text().strip()} {os.readlink(NETWORK)}"
    except OSError:
        place = socket.gethostname()
    return f"{place} {os.environ.get('GROUP_RANK', '')}"


def equal_runs(names: Sequence[str]) -> int:
    """How many ranks each host has, by their hosts' names in rank order.

    It is 1 where hosts have unlike numbers of ranks, or ranks take turns on them.
    """
    local = names.count(names[0])
    starts = range(0, len(names), local)
    runs = [set(names[begin : begin + local]) for begin in starts]
    alike = all(len(run) == 1 for run in runs) and len(set(names)) == len(runs)
    return local if alike and len(names) % local == 0 else 1


def give_up(group: dist.ProcessGroup) -> None:
    """Close a group of gradtide's own, unless it is one of some ranks alone.

    Torch names such a group by the number of groups that there are. If it were closed,
    the next would have its name, and find the addresses of ranks that are gone.
    """
    if dist.get_world_size(group) == dist.get_world_size():
        dist.destroy_process_group(group)
