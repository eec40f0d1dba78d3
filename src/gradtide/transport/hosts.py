"""Which ranks share a host, so that what they tell each other crosses no link."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = "/proc/self/ns/net"


class Whereabouts(NamedTuple):
    """What a rank knows of its host: its name, and which of the launcher's it is.

    `network` is that of the processes that reach each other without a network card.
    """

    name: str
    launched: str | None
    network: str = ""


def whereabouts() -> Whereabouts:
    """Those of this process."""
    return Whereabouts(host_name(), _launched(), network())


def host_name() -> str:
    """What is the same for all processes of a host.

    What one torchrun has started (`GROUP_RANK`) is a host in any case.
    """
    return f"{network()} {os.environ.get('GROUP_RANK', '')}"


def network() -> str:
    """What is the same for all processes that reach each other without a network card.

    These are the processes of one network namespace of one machine: containers with
    networks of their own are hosts of their own. Elsewhere than on Linux it is the name
    of the machine.
    """
    try:
        return f"{BOOT.read_text().strip()} {os.readlink(NETWORK)}"
    except OSError:
        return socket.gethostname()


def _launched() -> str | None:
    """The host as a launcher counts it, if it has put several ranks there."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = [os.environ.get(name, "") for name in names]
    if not all(value.isascii() and value.isdecimal() for value in found):
        return None
    rank, place, local = map(int, found)
    if local < 2 or place >= local:
        return None
    group = os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK"))
    return group or f"from {rank - place}"


def hosts_of(told: Sequence[Whereabouts]) -> tuple[tuple[int, ...], ...]:
    """The ranks of every host, from what all say in rank order.

    Where no two share a name, though a launcher has put several on every host (each in
    a container, say), it is believed.
    """
    keys: list[str | None] = [one.name for one in told]
    if len(set(keys)) == len(told) and all(one.launched for one in told):
        keys = [one.launched for one in told]
    found: dict[str | None, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return tuple(map(tuple, found.values()))


def give_up(group: dist.ProcessGroup) -> None:
    """Close a group of gradtide's own, unless it is one of some ranks alone.

    Torch names such a group by the number of groups that there are. If it were closed,
    the next would have its name, and find the addresses of ranks that are gone. Where
    the program has destroyed all groups, this one is gone, too.
    """
    if not dist.is_initialized():
        return
    if dist.get_world_size(group) == dist.get_world_size():
        dist.destroy_process_group(group)
