"""What each constant of the exchange of steps does to the loss, on five tasks.

    torchrun --nproc-per-node 4 benchmarks/ablation.py \
        --out benchmarks/records/ablation.json

Dense training takes the best of several learning rates, task by task; all others take
the same one. Dense exchange with few bits and every sparse scheme are then trained from
each seed as they are, and those of `--vary` with one constant changed. What the record
holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from tasks import TASKS, build

import gradtide
from gradtide.lab.record import machine, versions
from gradtide.scheme import Scheme, parse

DENSE = "wfbp"


def compared(steps: int) -> dict[str, str]:
    """The schemes, with two fifths of the steps as a warm-up, by a short name.

    Rounds are also tried without ("cold"): a warm-up sends 30 times as much.
    """
    rest = f"schedule='local', warmup={steps * 2 // 5}"
    return {
        "int8": "wfbp(wire='int8')",
        "e3m0": "wfbp(wire='e3m0')",
        "exdyna": f"exdyna(0.01, {rest})",
        "topka2a": f"topka2a(0.02, {rest})",
        "topka2a e3m0": f"topka2a(0.02, {rest}, wire='e3m0')",
        "oktopk": f"oktopk(0.01, {rest})",
        **{
            f"{name} {every}": f"{name}(every={every}, warmup={steps * 2 // 5})"
            for name, every in (("diloco", 10), ("diloco", 30), ("sparseloco", 10))
        },
        "diloco 10 cold": "diloco(every=10)",
        "diloco 30 cold": "diloco(every=30)",
    }


VARIANTS: dict[str, dict[str, Any]] = {  # fields of the schedule
    "as it is": {},
    "nothing ahead": {"ahead": 0.0},
    "half ahead": {"ahead": 0.5},
    "against counts in full": {"against": 1.0},
    "noise not made up for": {"noise": False},
    "gain 1": {"gain": 1.0},
}


def varied(scheme: str, variant: str) -> Scheme:
    """The scheme, with other fields of its schedule."""
    found = parse(scheme)
    return replace(found, schedule=replace(found.schedule, **VARIANTS[variant]))


def train(task: str, scheme: Scheme, rate: float, seed: int, steps: int) -> float:
    """The held-out loss after `steps`; NaN if training broke down."""
    work = build(task, dist.get_rank(), seed, rate, steps)
    assert work.evaluate is not None
    assert work.scheduler is not None
    model, optimizer = work.model, work.optimizer
    scheduler = work.scheduler(optimizer)
    sync = gradtide.replicate(model, optimizer, scheme)
    try:
        for step in range(steps):
            work.loss(model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
            sync.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return work.evaluate(model)["loss"]
    finally:
        sync.remove()


class Table:
    """The record, and what is run for it: rank 0 writes after every run."""

    def __init__(self, out: Path, steps: int) -> None:
        self.out, self.steps = out, steps
        self.record: dict[str, Any] = {
            "command": "torchrun --nproc-per-node 4 benchmarks/ablation.py",
            "versions": versions(),
            "machine": machine(),
            "steps": steps,
            "runs": [],
        }
        if out.exists():
            self.record = json.loads(out.read_text())
        dist.barrier()

    def loss(
        self, task: str, name: str, variant: str, rate: float, seed: int, scheme: str
    ) -> float:
        """Of a run that is in the record, or that is made and put there."""
        key = {
            "task": task,
            "scheme": name,
            "variant": variant,
            "rate": rate,
            "seed": seed,
        }
        for done in self.record["runs"]:
            if all(done[k] == v for k, v in key.items()):
                return float(done["loss"])
        begin = time.perf_counter()
        loss = train(task, varied(scheme, variant), rate, seed, self.steps)
        seconds = round(time.perf_counter() - begin, 1)
        self.record["runs"].append(key | {"loss": loss, "seconds": seconds})
        if dist.get_rank() == 0:
            print(f"{key} {loss:.4f} in {seconds} s", flush=True)
            self.out.write_text(json.dumps(self.record, indent=1) + "\n")
        return loss


def tuned(table: Table, task: str) -> float:
    """The learning rate at which dense training ends lowest, from seed 0.

    Rates are added at the upper end for as long as the highest is the best.
    """

    def end(rate: float) -> float:
        return table.loss(task, DENSE, "as it is", rate, 0, DENSE)

    rates = [*TASKS[task].rates]
    while (best := min(rates, key=end)) == rates[-1]:
        rates.append(2 * best)
    return best


def go(table: Table, args: argparse.Namespace) -> None:
    """All runs: dense and each scheme as it is, then some in variants."""
    schemes, tasks, seeds = compared(table.steps), args.tasks.split(","), args.seeds
    as_they_are = [(DENSE, "as it is", DENSE)]
    as_they_are += [(s, "as it is", schemes[s]) for s in args.schemes.split(",") if s]
    variants = [
        (name, variant, schemes[name])
        for name in args.vary.split(",")
        for variant in args.variants.split(",")
        if variant
    ]
    for rows in (as_they_are, variants):
        for seed in range(seeds):
            for task in tasks:
                rate = tuned(table, task)
                for name, variant, scheme in rows:
                    table.loss(task, name, variant, rate, seed, scheme)


def summary(record: dict[str, Any]) -> str:
    """For each scheme and variant, by how many per cent it ends above tuned dense."""
    runs = record["runs"]
    ends = {
        (r["task"], r["scheme"], r["variant"], r["rate"], r["seed"]): r["loss"]
        for r in runs
    }
    rates = {r["task"]: r["rate"] for r in runs if r["scheme"] != DENSE}
    rows = sorted({(r["scheme"], r["variant"]) for r in runs if r["scheme"] != DENSE})
    lines = ["| scheme | " + " | ".join(rates) + " |"]
    lines.append("|---|" + "--:|" * len(rates))
    for name, variant in rows:
        cells = []
        for task, rate in rates.items():
            above = [
                loss / ends[task, DENSE, "as it is", rate, seed] - 1
                for (t, s, v, _, seed), loss in ends.items()
                if (t, s, v) == (task, name, variant)
                and (task, DENSE, "as it is", rate, seed) in ends
            ]
            cells.append(f"{100 * mean(above):+.1f} %" if above else "")
        lines.append(f"| `{name}`, {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--schemes", default=",".join(compared(1)))
    parser.add_argument("--vary", default="exdyna")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    table = Table(args.out, args.steps)
    go(table, args)
    if dist.get_rank() == 0:
        print(summary(table.record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
