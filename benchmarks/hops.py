"""How many ways of a message each kind of request takes: run on far hosts of a lab.

    gradtide lab run --hosts 4 --rate 200mbit --delay 100ms -- \
        python benchmarks/hops.py --out benchmarks/records/hops_4x200mbit_100ms.json

All ranks ask at one moment, told by the hosts' common clock. What is reported is how
long it takes until the last rank has its answer, in ways of a message (half a round
trip, as the system has seen it), beside what `planner.clock.cost.hops` counts. Medians
of some rounds, after others in which connections get up to their rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from gradtide.core import ops
from gradtide.core.engine import Engine
from gradtide.core.ops import Op
from gradtide.lab.record import commit, machine, versions
from gradtide.planner.clock.cost import hops
from gradtide.transport import connect
from gradtide.transport.gloo import GlooTransport

AHEAD = 0.7  # seconds, in which all hear when to begin


def numbers(kilobytes: int) -> Tensor:
    return torch.zeros(kilobytes * 256)


def requests(rank: int, size: int) -> dict[str, Op]:
    """Of each kind one; what a rank sends to each other one is 4 KB where it can be."""
    rows = [1024] * size
    return {
        "AllReduce, 4 KB": ops.AllReduce(numbers(4)),
        "AllReduce, 80 KB": ops.AllReduce(numbers(80)),
        "Mean, 16 KB": ops.Mean(numbers(16)),
        "Mean, 1.6 MB": ops.Mean(numbers(1600)),
        "ReduceScatter, 16 KB": ops.ReduceScatter(numbers(16)),
        "AllGather, 16 KB": ops.AllGather(numbers(4)),
        "AllToAll, 16 KB": ops.AllToAll(numbers(4 * size), rows, rows),
        "Swap, 4 KB": ops.Swap(numbers(4), rank ^ 1),
        "Broadcast, 4 KB": ops.Broadcast(numbers(4), 0),
    }


def seconds(engine: Engine, name: str, op: Op) -> float:
    """From a moment that all wait for until the last rank has its answer."""
    told = engine.transport.gather_objects(time.monotonic() + AHEAD)
    time.sleep(max(told[0] - time.monotonic(), 0.0))
    engine.ask(name, op)()
    return float(max(engine.transport.gather_objects(time.monotonic() - told[0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = connect(None, torch.device("cpu"))
    assert isinstance(transport, GlooTransport)
    engine, way = Engine(transport), transport.distance.most
    rank, size = engine.group
    found: dict[str, list[float]] = {}
    for turn in range(3 + asked.rounds):
        for name, op in requests(rank, size).items():
            took = seconds(engine, name, op)
            if turn >= 3:
                found.setdefault(name, []).append(took)
    rows = [
        {
            "request": name,
            "hops": hops(op, engine.group),
            "taken": round(median(found[name]) / way, 2),
            "seconds": [round(took, 4) for took in found[name]],
        }
        for name, op in requests(rank, size).items()
    ]
    if rank == 0:
        for row in rows:
            print(f"{row['request']:>22}: {row['hops']} {row['taken']}")
    if rank == 0 and asked.out is not None:
        record = {
            "command": f"python {' '.join(sys.argv)}",
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "ranks": size,
            "way": way,
            "rows": rows,
        }
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
