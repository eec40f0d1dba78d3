"""What there is: versions, tools, the bandwidth of a copy, and links that are slow."""

from __future__ import annotations

import os
import platform
import shutil
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gpu.results import Bar, Book
from gpu.setting import Setting
from gradtide.lab.cluster import Cluster
from gradtide.lab.job import joined, on_every_rank

BARS = (
    Bar("4 MB all-reduced at 1 Gb/s, by the rate", "links of 1 Gb/s", "times", 1.25),
    Bar("4 MB all-reduced at 10 Gb/s, by the rate", "links of 10 Gb/s", "times", 2.0),
)
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "gcc", "git")
MESSAGE = 1 << 20  # floats


def measure(book: Book, setting: Setting) -> None:
    book.measure(
        {
            "machine": machine,
            **({"card": card} if setting.cuda else {}),
            "copy": partial(copy, setting),
            "links of 1 Gb/s": partial(links, 1e9),
            "links of 10 Gb/s": partial(links, 1e10),
        }
    )


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "root": os.geteuid() == 0,
        "tools": {tool: shutil.which(tool) is not None for tool in TOOLS},
    }


def card() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": torch.cuda.get_device_capability(0),
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "nccl": torch.cuda.nccl.version(),  # type: ignore[no-untyped-call]
    }


def copy(setting: Setting) -> dict[str, float]:
    """Of 2 GiB, read and written."""
    numel = 1 << (20 if setting.tiny else 29)
    took = setting.copy_milliseconds(numel)
    return {"TB/s": 8 * numel / took / 1e9}


def links(rate: float) -> dict[str, float]:
    """Whether links can be slowed down here: two hosts of the lab, without a GPU."""
    took = on_every_rank(Cluster(2, rate=rate), exchange)
    return {"seconds": took, "times": took / (4 * MESSAGE * 8 / rate)}


def exchange() -> float | None:
    with joined() as (rank, _):
        x = torch.zeros(MESSAGE)
        dist.all_reduce(x)
        start = time.perf_counter()
        for _ in range(5):
            dist.all_reduce(x)
        took = (time.perf_counter() - start) / 5
    return took if rank == 0 else None
