"""How close searches for the size of buckets come to the best size there is.

    python benchmarks/fusion.py --out benchmarks/records/fusion.json

Four workloads on three networks, on the virtual clock: sizes between the smallest that
is searched and the whole model, evenly on a logarithmic scale, are all simulated; then
each search goes its way. Compared are the steps of the best sizes found. MG-WFBP,
which searches nothing, and the default fusion stand beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradtide.fusion import (
    Bayesian,
    BinarySearch,
    BySize,
    Fusion,
    MgWfbp,
    Search,
    best,
    search,
)
from gradtide.lab.record import commit, machine, versions
from gradtide.lab.workloads.replay import STEP_MS
from gradtide.lab.workloads.shapes import units
from gradtide.planner.network import Network
from gradtide.planner.trace import StepTrace, Unit
from gradtide.planner.virtual import simulate
from gradtide.scheme import Scheme, parse

WORKLOADS = ("resnet50", "bert-base", "bert-large", "gpt2")
NETWORKS = {  # hosts with one rank each; bits a second; seconds to start a message
    "32 x 1 Gb/s": (32, 1e9, 100e-6),
    "16 x 10 Gb/s": (16, 10e9, 50e-6),
    "64 x 25 Gb/s": (64, 25e9, 20e-6),
}
BACKWARD = 2 / 3  # of a step that computes only
SEARCHES: dict[str, Search] = {"binary": BinarySearch(12), "bayesian": Bayesian(15)}
FIXED: dict[str, Fusion] = {"mg-wfbp": MgWfbp(), "default": BySize()}


def trace(workload: str) -> StepTrace:
    """A workload's tensors, with a step's time shared out by work."""
    layers = units(workload)[::-1]
    total = sum(layer.work for layer in layers)
    tensors = []
    for layer in layers:
        seconds = STEP_MS[workload] / 1000 * layer.work / total
        for i, (name, shape) in enumerate(layer.shapes[::-1]):
            # Those of a layer get ready together, and are read together.
            first, last = i == 0, i == len(layer.shapes) - 1
            tensors.append(
                Unit(
                    f"{layer.name}.{name}",
                    prod(shape),
                    4,
                    forward=seconds * (1 - BACKWARD) * last,
                    backward=seconds * BACKWARD * first,
                    optimizer=0.0,
                )
            )
    return StepTrace(workload, tuple(tensors), optimizer=0.0)


def measure(workload: str, network: str, scheme: Scheme, sizes: int) -> dict[str, Any]:
    """The best of all sizes, and what every search finds, in seconds of a step."""
    step = trace(workload)
    hosts, rate, alpha = NETWORKS[network]
    cluster = Network.ideal(hosts, 1, rate, alpha=alpha)

    def seconds(fusion: Fusion) -> float:
        return simulate(step, replace(scheme, fusion=fusion), cluster).step

    found: dict[str, Any] = {"workload": workload, "network": network}
    found["exhaustive"] = _exhaustive(SEARCHES["binary"], step.nbytes, sizes, seconds)
    for name, one in SEARCHES.items():
        start = time.perf_counter()
        tried = search(one, step.nbytes, seconds)
        found[name] = {
            "megabytes": best(tried).megabytes,
            "seconds": best(tried).seconds,
            "trials": len(tried),
            "took": time.perf_counter() - start,
        }
    for name, fusion in FIXED.items():
        found[name] = {"seconds": seconds(fusion)}
    least = found["exhaustive"]["seconds"]
    for name in (*SEARCHES, *FIXED):
        found[name]["above"] = found[name]["seconds"] / least - 1
    return found


def _exhaustive(
    one: Search, whole: int, sizes: int, seconds: Callable[[Fusion], float]
) -> dict[str, Any]:
    span = whole / 1e6 / one.smallest
    tried = [one.smallest * span ** (i / (sizes - 1)) for i in range(sizes)]
    times = [seconds(one.at(size)) for size in tried]
    least = min(times)
    return {
        "megabytes": tried[times.index(least)],
        "seconds": least,
        "worst": max(times) / least - 1,
        "sizes": sizes,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """A table: what each fusion takes above the best size of all."""
    table = Table(title="step time above the best of all sizes")
    names = [*SEARCHES, *FIXED]
    for name in ("workload", "network", "best", "at MB", "worst size", *names):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for row in rows:
        every = row["exhaustive"]
        found = [f"{row[name]['above']:.2%}" for name in names]
        table.add_row(
            row["workload"],
            row["network"],
            f"{1e3 * every['seconds']:.1f} ms",
            f"{every['megabytes']:.3g}",
            f"{every['worst']:.0%}",
            *found,
        )
    Console(width=120).print(table)
    for name in SEARCHES:
        worst = max(row[name]["above"] for row in rows)
        most = max(row[name]["trials"] for row in rows)
        print(f"{name}: at most {worst:.2%} above the best, {most} trials")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="wfbp", help="its fusion is replaced")
    parser.add_argument("--sizes", type=int, default=200)
    parser.add_argument("--workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [
        measure(workload, network, parse(args.scheme), args.sizes)
        for workload in args.workloads
        for network in NETWORKS
    ]
    show(rows)
    if args.out is not None:
        head = {"scheme": args.scheme, "commit": commit(), "versions": versions()}
        head["machine"] = machine()
        searches = {name: repr(one) for name, one in SEARCHES.items()}
        networks = {
            name: dict(zip(("hosts", "bits_per_second", "alpha"), values, strict=True))
            for name, values in NETWORKS.items()
        }
        record = {**head, "searches": searches, "networks": networks, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
