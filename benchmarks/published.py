"""Published iteration times against those of the virtual clock.

    python benchmarks/published.py --out FILE.json
    python benchmarks/published.py --published benchmarks/published_more.csv

The rows of published_times.csv and published_more.csv are those of ddl-benchmarks
(HKBU-HPML, 2020-05-29): hosts of 4 V100 (PCIe), NCCL's ring all-reduce under Horovod.
Known are the time of one GPU alone, and the tensors. One (alpha, beta) stands for each
network and one for PCIe, which all have inside their hosts, one number for the
software, and two for the device: by how much a running all-reduce and what is computed
slow each other. Nothing is fitted to a row.
BSP is SEQUENTIAL with one bucket, un-fused WFBP is PerTensor(). MG-WFBP cuts its
buckets as that program does: by a table of start-ups and seconds per byte that it has
in its source, whatever the network.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradtide.collectives import Dense
from gradtide.core.schedule import SEQUENTIAL, WFBP
from gradtide.fusion import BySize, Cuts, Fusion, MgWfbp, PerTensor
from gradtide.planner.data.presets import SLOWED, STARVED
from gradtide.planner.network import Device, Line, Link, Network
from gradtide.planner.trace import StepTrace
from gradtide.planner.virtual import simulate
from gradtide.scheme import Scheme
from gradtide.simulate.grid import replayed

TIMES = Path(__file__).with_name("published_times.csv")
MORE = Path(__file__).with_name("published_more.csv")
GPUS = 4  # a host
# Seconds of one GPU alone, and of these the forward's share: 1/3.
ALONE = {
    "resnet50-bs64": ("resnet50", 0.2529),
    "bert-base-bs64-seq64": ("bert-base-pretraining", 0.3008),
    "bert-large-bs8-seq64": ("bert-large-pretraining", 0.1633),
}
PCIE = Link.of(5.2e-6, 2.11e-10)
LINKS = {
    "10GbE": Link.of(38e-6, 1.08 / 1.25e9),
    "100Gb-IB": Link.of(5.2e-6, 1 / 12.5e9),
    # Over TCP/IP: as 10GbE starts, and with the rate of the one row that is left out of
    # published_more.csv (BSP of BERT-large, 8 GPUs).
    "100GbE": Link.of(38e-6, 4.18e-10),
}
# What a request takes before it is on any wire: an all-reduce, which is one, takes so
# much beyond 2 (P - 1) alpha, on both networks alike (Horovod's, and a launch).
REQUEST = 1.2e-4
# Seconds per element of SGD with momentum and weight decay, one operation at a time: 11
# times 4 bytes through the memory of a V100, at 750 of its 900 GB/s.
OPTIMIZER = 11 * 4 / 750e9
DEVICE = Device(request=REQUEST, optimizer=Line(each=OPTIMIZER))
# What MG-WFBP takes an all-reduce among so many GPUs for: seconds of its start, and per
# byte (the tables of its program, distributed_optimizer.py).
INSIDE = {2: (2.55e-6, 9.84e-11), 4: (4.2e-5, 2.06e-10)}
TOLD = {
    "100Gb-IB": INSIDE
    | {8: (9.75e-5, 3.06e-10), 16: (2.358e-4, 4.06e-10), 32: (4.06e-4, 4.91e-10)},
    "10GbE": INSIDE
    | {8: (5.23e-4, 8.57e-10), 16: (9.08e-4, 7.4e-10), 32: (4.04e-3, 8.64e-10)},
}
TOLD["100GbE"] = TOLD["100Gb-IB"]  # what that program takes it for
# One ring through all GPUs (levels=1), as NCCL had it there.
SCHEMES = {
    "BSP": Scheme(Dense(), BySize(1e6, ends=1e6, pieces=1), SEQUENTIAL, levels=1),
    "WFBP-unfused": Scheme(Dense(), PerTensor(), WFBP, levels=1),
    "MG-WFBP": Scheme(Dense(), MgWfbp(), WFBP, levels=1),
}
ALLOWED = {"BSP": 0.05, "WFBP-unfused": 0.10, "MG-WFBP": 0.10}
NEAR, SHARE, MIDDLE = 0.10, 0.9, 0.05  # of rows that nothing was allowed for, each
NOISE = 0.02  # methods that were published closer than this have no order


@dataclass(frozen=True)
class Row:
    """Seconds of an iteration."""

    network: str
    workload: str
    method: str
    gpus: int
    published: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1


def network(name: str, gpus: int) -> Network:
    """The cluster: NCCL knows no one-hop messages, and the device costs nothing."""
    hosts = max(gpus // GPUS, 1)
    local = min(gpus, GPUS)
    there = Network(hosts, local, LINKS[name], PCIE, DEVICE, one_hop_ranks=0)
    return replace(there, interference=SLOWED, starved=STARVED)


def trace(workload: str) -> StepTrace:
    """One GPU alone: what the optimizer leaves of its time is forward and backward."""
    architecture, alone = ALONE[workload]
    optimizer = OPTIMIZER * replayed(architecture, 1.0).numel
    computed = replayed(architecture, 1e3 * (alone - optimizer))
    return replace(computed, optimizer=optimizer)


def scheme(method: str, trace: StepTrace, name: str, gpus: int) -> Scheme:
    """A method as it was run; MG-WFBP with its own table, if it has this network."""
    found = SCHEMES[method]
    if not isinstance(found.fusion, MgWfbp) or gpus not in TOLD.get(name, {}):
        return found
    start, each = TOLD[name][gpus]
    cuts = found.fusion(trace.fusion(), lambda nbytes: start + each * nbytes)
    fusion: Fusion = Cuts(tuple(cut.stop for cut in cuts))
    return replace(found, fusion=fusion)


def rows(published: Path) -> list[Row]:
    """Every published row that there is a scheme for."""
    found = []
    with published.open() as file:
        for line in csv.DictReader(file):
            name, gpus = line["network"], int(line["num_gpus"])
            alone, there = trace(line["workload"]), network(name, gpus)
            run = scheme(line["method"], alone, name, gpus)
            step = simulate(alone, run, there).step
            seconds = float(line["seconds_per_iteration"])
            key = (name, line["workload"], line["method"], gpus)
            found.append(Row(*key, seconds, step))
    return found


def disordered(found: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs of methods in the other order than published."""
    return [
        (a, b)
        for a, b in combinations(found, 2)
        if (a.network, a.workload, a.gpus) == (b.network, b.workload, b.gpus)
        and abs(a.published / b.published - 1) > NOISE
        and (a.published < b.published) != (a.simulated < b.simulated)
    ]


def general(found: Sequence[Row]) -> tuple[float, float]:
    """The share of rows that are near, and the median error."""
    errors = [abs(row.error) for row in found]
    return sum(e <= NEAR for e in errors) / len(errors), median(errors)


def main(
    published: Annotated[Path, typer.Option(help="Other rows, as there.")] = TIMES,
    out: Annotated[Path | None, typer.Option(help="Write JSON there.")] = None,
) -> None:
    """Print published and simulated seconds, and whether the bar is met."""
    found = rows(published)
    table = Table(box=None, header_style="bold")
    for name in ("network", "workload", "method", "GPUs", "published", "simulated"):
        table.add_column(name, justify="left" if name in "network method" else "right")
    table.add_column("error", justify="right")
    for r in found:
        mark = "" if abs(r.error) <= ALLOWED[r.method] else " !"
        text = (r.network, r.workload, r.method, str(r.gpus))
        seconds = (f"{r.published:.4f}", f"{r.simulated:.4f}")
        table.add_row(*text, *seconds, f"{100 * r.error:+.1f} %{mark}")
    console = Console()
    console.print(table)
    worst = {m: max(abs(r.error) for r in found if r.method == m) for m in SCHEMES}
    wrong = disordered(found)
    for name, error in worst.items():
        console.print(f"{name}: at most {error:.1%} off (allowed {ALLOWED[name]:.0%})")
    for a, b in wrong:
        place = f"{a.network} {a.workload} {a.gpus}"
        console.print(f"{place}: {a.method} and {b.method} in another order")
    within, middle = general(found)
    met = not wrong and all(worst[m] <= ALLOWED[m] for m in SCHEMES)
    console.print(f"pairs in another order: {len(wrong)}; met: {met}")
    near = within >= SHARE and middle <= MIDDLE
    console.print(f"{within:.0%} within {NEAR:.0%}, median {middle:.1%}; met: {near}")
    if out is not None:
        record = {
            "command": " ".join(sys.argv),
            "links": {n: repr(v) for n, v in {**LINKS, "PCIe": PCIE}.items()},
            "worst": worst,
            "disordered": len(wrong),
            "met": met,
            "within": within,
            "median": middle,
            "rows": [{**vars(r), "error": r.error} for r in found],
        }
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
