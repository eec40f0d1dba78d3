r"""One all-reduce between far ranks: gradtide's, Gloo's and DDP's, side by side.

    gradtide lab run --hosts 4 --rate 200mbit --delay 100ms -- \
        python -m benchmarks.far_reduce --rate 200mbit --out out/far_reduce.json

The limit is what a link needs for its bytes: 2 (P - 1) / P of the buffer. The first
round of each is left out, in which connections learn their way. With `--stock` as where
BBR is not allowed. (Far hosts of the lab have CUBIC for all that ask for nothing else.)
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradtide.core.engine import Engine
from gradtide.core.ops import Flow, Mean
from gradtide.lab.rate import parse_rate
from gradtide.lab.record import commit, machine, versions
from gradtide.transport import stream
from gradtide.transport.connect import connect
from gradtide.transport.several import wish

MEGABYTE = 250_000  # elements


def mean(x: torch.Tensor) -> Flow:
    """A flow that averages a buffer."""
    answer: torch.Tensor = yield Mean(x)
    return answer


def contestants(megabytes: int) -> dict[str, Callable[[], object]]:
    """What each does in a round, by name."""
    x = torch.ones(megabytes * MEGABYTE)
    engine = Engine(connect(None, torch.device("cpu")))
    model = nn.Linear(MEGABYTE // 10, 10 * megabytes, bias=False)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parts = [*x.chunk(max(1, megabytes // 10))]
    example = torch.ones(1, MEGABYTE // 10)

    def buckets() -> None:
        flights = [engine.launch(f"part {i}", mean(p)) for i, p in enumerate(parts)]
        for flight in flights:
            engine.finish(flight)

    return {
        "gradtide": lambda: engine.finish(engine.launch("x", mean(x))),
        "gradtide, 10 MB at a time": buckets,
        "gloo": lambda: dist.all_reduce(x),
        "ddp": lambda: ddp(example).sum().backward(),
    }


def main() -> None:
    """Measure, and print what rank 0 has seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rate", required=True, help="of the links, such as 200mbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="names, separated by semicolons")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stock", action="store_true", help="BBR is not allowed")
    argv = sys.argv[1:]
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.stock:
        stream.CONGESTION = 0  # is no option: the system refuses
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    size = dist.get_world_size()
    nbytes = args.megabytes * MEGABYTE * 4
    rate = parse_rate(args.rate)
    assert rate
    limit = 2 * (size - 1) / size * nbytes * 8 / rate
    found: dict[str, list[float]] = {}
    chosen = [each for each in args.only.split(";") if each]
    works = contestants(args.megabytes)
    for _ in range(args.rounds + 1):
        for name, work in works.items():
            if chosen and name not in chosen:
                continue
            dist.barrier()
            begin = time.perf_counter()
            work()
            found.setdefault(name, []).append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        medians = {name: statistics.median(all_[1:]) for name, all_ in found.items()}
        told = {"ranks": size, "megabytes": args.megabytes, "rate": args.rate}
        told |= {"bbr": not args.stock, "connections": wish(size).far}
        told |= {"limit_s": limit, "median_s": medians, "seconds": found}
        told |= {
            "command": shlex.join(["python", "-m", "benchmarks.far_reduce", *argv])
        }
        told |= {"commit": commit(), "machine": machine(), "versions": versions()}
        print(json.dumps(told), flush=True)
        if args.out:
            args.out.write_text(json.dumps(told, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
