"""A process group as training makes one, and the network as the planner sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gradtide.core.transport import CommunicationError
from gradtide.doctor.meeting import Meeting
from gradtide.planner.measuring.bench import RankError
from gradtide.planner.network import Network
from gradtide.profile.network.run import Plan, measure
from gradtide.transport import connect


@dataclass(frozen=True)
class Tried:
    """What came of it on this rank; `levels` are ranks that average among themselves.

    `error` is empty where all went well.
    """

    error: str = ""
    levels: int = 1
    network: Network | None = None


def tried(
    meeting: Meeting,
    layout: tuple[int, int] | None,
    seconds: float,
    stage: Callable[[str], None],
) -> Tried:
    """Make a group over Gloo, exchange by it, and measure it for about so long.

    A collective call. `layout` is hosts and ranks on each, where all have equally many.
    """
    place, levels, network = meeting.place, 1, None
    stage("making a process group over Gloo")
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("gloo", meeting.store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=meeting.seconds),
        )
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if int(ones) != place.size:
            return Tried(f"the sum of {place.size} ones came out as {int(ones)}")
        if place.size > 1:
            transport = connect(None, torch.device("cpu"))
            levels = math.gcd(*map(len, transport.hosts))
            transport.close()
            if seconds:
                stage("measuring the network over Gloo")
                plan = Plan(*(layout or (place.size, 1)), None, seconds)
                network = measure(plan).network
        dist.destroy_process_group()
    except (RuntimeError, ValueError, CommunicationError, RankError) as error:
        return Tried(str(error).strip().splitlines()[0] or type(error).__name__)
    return Tried("", levels, network)
