"""Predicted step times against measured ones, over a grid of clusters in the lab.

    python benchmarks/predictions.py run --folder out/predictions [--dry-run]
    python benchmarks/predictions.py table --folder out/predictions --out FILE.json

A cluster is so many hosts behind links of one rate. `run` makes what is not there yet:
a trace for each workload and number of hosts, a network profile for each cluster, and
the measured steps, each by the command that a user would type. It can be ended at any
time and called again. `table` predicts every cell from the trace and the profile alone
and holds it against what was measured.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from predictions_lab import Cluster, jobs
from rich.console import Console
from rich.table import Table

from gradtide.lab.record import commit, machine, milliseconds, versions
from gradtide.lab.spec import split_schemes
from gradtide.planner import network as networks
from gradtide.planner import search
from gradtide.planner import trace as traces
from gradtide.planner.virtual import Prediction, simulate
from gradtide.scheme import parse
from gradtide.scheme.spelling import respelled

WORKLOADS = ("replay:resnet50", "replay:bert-base")
HOSTS = (4, 8)
RATES = ("50mbit", "200mbit", "1gbit")
SCHEMES = ("wfbp", "dear", "wfbp(wire='bf16')", "topk", "topka2a", "oktopk")
NEAR, SHARE, MIDDLE = 0.10, 0.9, 0.05  # the bar: errors of cells, and their median
BEHIND = 1.05  # the pick may take so many times as long as the fastest
PARTS = ("forward", "backward", "exposed", "apply", "select")

app = typer.Typer(no_args_is_help=True)


@dataclass(frozen=True)
class Cell:
    """One scheme on one cluster; seconds of a step."""

    cluster: Cluster
    scheme: str
    predicted: Prediction
    measured: dict[str, Any]  # a result of gradtide compare

    @property
    def error(self) -> float:
        return self.predicted.step / float(self.measured["step_seconds"]) - 1


def cells(clusters: Sequence[Cluster]) -> list[Cell]:
    """Everything that has been measured."""
    found: dict[tuple[Cluster, str], Cell] = {}
    for cluster in clusters:
        if not (cluster.trace.exists() and cluster.network.exists()):
            continue
        trace, network = traces.load(cluster.trace), networks.load(cluster.network)
        records = cluster.measured("*") / "record.json"
        for record in sorted(
            cluster.folder.glob(str(records.relative_to(cluster.folder)))
        ):
            for result in json.loads(record.read_text(encoding="utf-8"))["results"]:
                # Records of before today's spellings are read, too.
                name = respelled(result["scheme"])
                predicted = simulate(trace, parse(name), network)
                found[cluster, name] = Cell(cluster, name, predicted, result)
    return list(found.values())


def pick(cluster: Cluster, measured: Sequence[Cell]) -> str:
    """The fastest of the measured schemes, by the planner."""
    trace, network = traces.load(cluster.trace), networks.load(cluster.network)
    names = [cell.scheme for cell in measured]
    schemes = {name: parse(name) for name in names}
    ranked = search.rank(trace, network, schemes, tune=False)
    return next(choice.name for choice in ranked if choice.name in names)


def columns(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """For every cluster, the planner's pick beside the fastest scheme."""
    made = []
    for cluster in dict.fromkeys(cell.cluster for cell in found):
        own = {c.scheme: c for c in found if c.cluster == cluster}
        steps = {n: float(c.measured["step_seconds"]) for n, c in own.items()}
        chosen, fastest = pick(cluster, list(own.values())), min(steps, key=steps.get)  # type: ignore[arg-type]
        behind = steps[chosen] / steps[fastest]
        row: dict[str, Any] = {"workload": cluster.workload}
        row |= {
            "hosts": cluster.hosts,
            "ranks_per_host": cluster.local,
            "rate": cluster.rate,
            "delay": cluster.delay,
            "schemes": len(own),
            "pick": chosen,
        }
        made.append(row | {"fastest": fastest, "behind": behind - 1})
    return made


def parts(cell: Cell) -> dict[str, tuple[float, float]]:
    """Predicted and measured seconds of what a step is made of."""
    return {
        name: (getattr(cell.predicted, name), float(cell.measured[f"{name}_seconds"]))
        for name in PARTS
        if cell.measured.get(f"{name}_seconds") is not None
    }


def shown(found: Sequence[Cell], detailed: bool) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("workload", "cluster", "scheme", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name in "workload scheme" else "right")
    names = PARTS if detailed else ()
    for name in names:
        table.add_column(name, justify="right")
    for cell in found:
        there, own = f"{cell.cluster.place} x {cell.cluster.links}", parts(cell)
        mark = "" if abs(cell.error) <= NEAR else " !"
        table.add_row(
            cell.cluster.short,
            there,
            cell.scheme,
            milliseconds(cell.predicted.step),
            milliseconds(float(cell.measured["step_seconds"])),
            f"{cell.error:+.1%}{mark}",
            *(
                " / ".join(map(milliseconds, own[name])) if name in own else ""
                for name in names
            ),
        )
    return table


def _clusters(
    folder: Path, workload: str, hosts: str, rate: str, delay: str
) -> list[Cluster]:
    asked = (text.split(",") for text in (workload, hosts, rate, delay))
    return [_cluster(folder, *one) for one in product(*asked)]


def _cluster(folder: Path, workload: str, place: str, rate: str, delay: str) -> Cluster:
    hosts, _, local = place.partition("x")
    far = "" if delay == "0ms" else delay
    return Cluster(folder, workload, int(hosts), rate, int(local or 1), far)


Folder = Annotated[Path, typer.Option(help="Where everything is kept.")]
Workload = Annotated[str, typer.Option(help="Which, with commas between.")]
Hosts = Annotated[
    str, typer.Option(help="How many, with commas between; 4x2: two ranks on each.")
]
Rate = Annotated[str, typer.Option(help="Of their links, with commas between.")]
Delay = Annotated[
    str, typer.Option(help="Of round trips between hosts, with commas between.")
]
Schemes = Annotated[str, typer.Option(help="Which.")]
NAMES = ",".join(SCHEMES)
ALL = (",".join(WORKLOADS), ",".join(map(str, HOSTS)), ",".join(RATES))


@app.command()
def run(
    folder: Folder = Path("out/predictions"),
    workload: Workload = ALL[0],
    hosts: Hosts = ALL[1],
    rate: Rate = ALL[2],
    delay: Delay = "0ms",
    schemes: Schemes = NAMES,
    minutes: Annotated[
        float | None, typer.Option(help="Begin nothing that would end later.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list.")] = False,
) -> None:
    """Measure what is missing, one command after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    clusters = _clusters(folder, workload, hosts, rate, delay)
    wanted = [job for c in clusters for job in jobs(c, split_schemes(schemes))]
    missing = {j.makes: j for j in wanted if not j.makes.exists()}
    total = sum(job.seconds for job in missing.values())
    print(f"{len(missing)} commands, about {total / 60:.0f} minutes")
    begin = time.monotonic()
    for job in missing.values():
        passed = (time.monotonic() - begin + job.seconds) / 60
        if minutes is not None and passed > minutes:
            continue
        print(
            f"about {job.seconds:.0f} s: gradtide {shlex.join(job.words)}", flush=True
        )
        if not dry_run:
            started = time.monotonic()
            subprocess.run([sys.executable, "-m", "gradtide", *job.words], check=True)
            print(f"took {time.monotonic() - started:.0f} s", flush=True)


@app.command()
def table(
    folder: Folder = Path("out/predictions"),
    workload: Workload = ALL[0],
    hosts: Hosts = ALL[1],
    rate: Rate = ALL[2],
    delay: Delay = "0ms",
    schemes: Schemes = NAMES,
    parts_too: Annotated[
        bool, typer.Option("--parts", help="Predicted / measured parts of steps.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON there.")] = None,
) -> None:
    """Predict what has been measured, and say whether the bar is met."""
    clusters = _clusters(folder, workload, hosts, rate, delay)
    asked = split_schemes(schemes)
    found = [cell for cell in cells(clusters) if cell.scheme in asked]
    if not found:
        raise typer.BadParameter(f"{folder} holds no measured cluster: use run first")
    (console := Console()).print(shown(found, parts_too))
    errors = [abs(cell.error) for cell in found]
    within = sum(error <= NEAR for error in errors) / len(errors)
    picks = columns(found)
    for row in picks:
        console.print(
            f"{row['workload']} {row['hosts']} x {row['ranks_per_host']} x "
            f"{row['rate']} {row['delay']}: of {row['schemes']} the pick is "
            f"{row['pick']}, {row['behind']:.1%} behind {row['fastest']}"
        )
    best = all(1 + row["behind"] <= BEHIND for row in picks)
    whole = len(found) == len(clusters) * len(asked)
    met = whole and within >= SHARE and median(errors) <= MIDDLE and best
    console.print(
        f"{len(found)} cells{'' if whole else ' (not all)'}: {within:.0%} within "
        f"{NEAR:.0%}, median error {median(errors):.1%}; met: {met}"
    )
    if out is not None:
        record = {
            "command": " ".join(sys.argv),
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            "within": within,
            "median": median(errors),
            "met": met,
            "picks": picks,
            "cells": [_written(cell) for cell in found],
            "inputs": [_inputs(c) for c in dict.fromkeys(c.cluster for c in found)],
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _written(cell: Cell) -> dict[str, Any]:
    where: dict[str, Any] = {"workload": cell.cluster.workload}
    where |= {"hosts": cell.cluster.hosts, "ranks_per_host": cell.cluster.local}
    where |= {"rate": cell.cluster.rate, "delay": cell.cluster.delay}
    where |= {"scheme": cell.scheme, "error": cell.error}
    return where | {"predicted": asdict(cell.predicted), "measured": cell.measured}


def _inputs(cluster: Cluster) -> dict[str, Any]:
    """What predictions were made of; of a trace, the sums."""
    trace = traces.load(cluster.trace)
    sums = {n: getattr(trace, n) for n in ("forward", "loss", "backward", "optimizer")}
    network = asdict(networks.load(cluster.network))
    return {"workload": cluster.workload, "trace": sums, "network": network}


if __name__ == "__main__":
    app()
