"""The three dense collectives against the wire: run on every rank of a cluster.

    gradtide lab run --hosts 8 --rate 1gbit -- \
        python benchmarks/collectives.py --out benchmarks/records/collectives.json

Prints, per collective, the median seconds over the repeats, the limit (payload bytes
over the link's rate) and the distance to it, and writes them as a record.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradtide.core.ops import AllGather, Op, ReduceScatter
from gradtide.lab.record import machine, versions
from gradtide.transport import Transport, connect


def timed(work: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each repeat on the slowest rank."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        work()
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    return seconds


def ask(transport: Transport, op: Op) -> Any:
    return transport.wait(transport.issue(op))


def contestants(numel: int) -> dict[str, tuple[float, Callable[[], Any]]]:
    """By name: the share of the buffer that each rank must send, and the work."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(numel)
    part = x.view(size, -1)[rank]
    transport = connect(None, x.device)
    half = (size - 1) / size
    return {
        "torch all_reduce": (2 * half, lambda: dist.all_reduce(x)),
        "gradtide reduce-scatter": (half, lambda: ask(transport, ReduceScatter(x))),
        "gradtide all-gather": (half, lambda: ask(transport, AllGather(part, into=x))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=102.4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    numel = int(args.megabytes * 1e6) // 4 // size * size
    rate = float(os.environ.get("GRADTIDE_LAB_RATE") or "nan")
    work = contestants(numel)
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(args.repeats):  # in turn, so that noise falls on all of them
        for name, (_, run) in work.items():
            seconds[name] += timed(run, 1)
    rows = []
    for name, (share, _) in work.items():
        limit = share * numel * 4 * 8 / rate
        middle = median(seconds[name][1:])
        over = middle / limit - 1
        rows.append(
            {
                "collective": name,
                "seconds": middle,
                "limit_seconds": limit,
                "over_limit": over,
            }
        )
        if dist.get_rank() == 0:
            print(f"{name:26} {middle:.3f} s  limit {limit:.3f} s  {over:+.1%}")
    if dist.get_rank() == 0 and args.out:
        hosts = os.environ.get("GRADTIDE_LAB_HOSTS")
        record = {
            "command": f"gradtide lab run --hosts {hosts} --rate {rate / 1e6:g}mbit -- "
            f"python benchmarks/collectives.py --megabytes {args.megabytes:g}",
            "versions": versions(),
            "machine": machine(),
            "ranks": size,
            "rate_bits_per_s": rate,
            "results": rows,
        }
        args.out.write_text(json.dumps(record, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
