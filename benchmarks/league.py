"""The league: time to a loss, for gradtide's schemes and for their rivals.

    OUT=benchmarks/records/league.json
    torchrun --nproc-per-node 4 benchmarks/league.py tune --out $OUT
    gradtide lab run --hosts 4 --rate 50mbit -- \
        python benchmarks/league.py race --rate 50mbit --out $OUT
    python benchmarks/league.py table --out $OUT

Everybody gets the same model, seed, data and number of steps. `tune` trains each at a
few learning rates on loopback and keeps the one at which the held-out loss ends lowest.
`race` trains at that rate over shaped links, one after the other, with the clock of
training alone. The target is the loss at which tuned DDP ends, and half a per cent
more. What the record holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rivals import RIVALS, Entrant, Make, scheme

from gradtide.lab.record import machine, versions
from gradtide.lab.spec import split_schemes
from gradtide.lab.workloads import Workload, build
from gradtide.selectors import Threshold

TIMES = (0.5, 1.0, 2.0)  # the workload's learning rate
MARGIN = 1.005
OURS = ",".join(
    (
        "wfbp(wire='bf16')",
        "dear(wire='bf16')",
        "exdyna(0.01, schedule='local', warmup=240, wire='bf16')",
        "topka2a(0.02, schedule='local', warmup=240, wire='bf16')",
    )
)


def make(name: str) -> Make:
    """A rival by its name, or a scheme by its text."""
    return RIVALS.get(name) or scheme(name)


def train(
    workload: str, name: str, factor: float, seed: int, steps: int, every: int
) -> list[dict[str, float]]:
    """Step, seconds of training and held-out loss, every so many steps."""
    work = build(workload, rank=dist.get_rank(), size=dist.get_world_size(), seed=seed)
    for group in work.optimizer.param_groups:
        group["lr"] *= factor
        group["initial_lr"] = group["lr"]
    assert work.scheduler is not None
    entrant = make(name)(work.model, work.optimizer, steps, work.max_norm or 1e9)
    scheduler = work.scheduler(work.optimizer)
    curve, seconds = [], 0.0
    try:
        for first in range(0, steps, every):
            number = min(every, steps - first)
            seconds += _lap(work, entrant, scheduler, first, number)
            curve.append({"step": first + number, "seconds": round(seconds, 3)})
            curve[-1] |= _shared_loss(work)
    finally:
        entrant.leave()
    return curve


def _lap(work: Workload, entrant: Entrant, scheduler: Any, first: int, n: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for step in range(first, first + n):
        work.loss(entrant.module, work.batch(step)).backward()  # type: ignore[no-untyped-call]
        entrant.step()
        scheduler.step()
    entrant.settle()
    dist.barrier()
    return time.perf_counter() - begin


def _shared_loss(work: Workload) -> dict[str, float]:
    """The mean of what the ranks find, which differ where their parameters do."""
    assert work.evaluate is not None
    found = torch.tensor(work.evaluate(work.model)["loss"])
    dist.all_reduce(found)
    return {"loss": float(found) / dist.get_world_size()}


class League:
    """The record: tuning runs and races, each written as soon as it is over."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.record: dict[str, Any] = {
            "versions": versions(),
            "machine": machine(),
            "workload": args.workload,
            "steps": args.steps,
            "tuned": [],
            "races": [],
        }
        if args.out.exists():
            self.record = json.loads(args.out.read_text())

    def run(self, kind: str, **key: Any) -> None:
        """Train once, unless the record has it."""
        rows = self.record[kind]
        if any(all(row[k] == v for k, v in key.items()) for row in rows):
            return
        args = self.args
        curve = train(
            args.workload,
            key["name"],
            key["factor"],
            key.get("seed", 0),
            args.steps,
            args.every,
        )
        rows.append(key | {"curve": curve})
        if dist.get_rank() == 0:
            print(f"{kind} {key} {curve[-1]}", flush=True)
            args.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def factor(self, name: str) -> float:
        """At which a contestant ended lowest, of those that were tried."""
        ends = {
            row["factor"]: row["curve"][-1]["loss"]
            for row in self.record["tuned"]
            if row["name"] == name
        }
        if not ends:
            raise SystemExit(f"{name} was not tuned: run `league.py tune` first")
        return float(min(ends, key=lambda factor: ends[factor]))

    def table(self) -> str:
        """Who is at the target when, for each rate of links."""
        lines = []
        rates = sorted({row["rate"] for row in self.record["races"]})
        for rate in rates:
            rows = [row for row in self.record["races"] if row["rate"] == rate]
            ends = [r["curve"][-1]["loss"] for r in rows if r["name"] == "ddp"]
            if not ends:
                continue
            target = MARGIN * sum(ends) / len(ends)
            first = min(there(r, target) for r in rows if r["name"] == "ddp")
            lines += [f"\n{rate}, target {target:.3f}\n"]
            lines += ["| contestant | rate x | ends at | there after | against `ddp` |"]
            lines += ["|---|--:|--:|--:|--:|"]
            for row in sorted(rows, key=lambda r: there(r, target)):
                when = there(row, target)
                told = (
                    "never | "
                    if when == float("inf")
                    else f"{when:.1f} s | {first / when:.2f}x"
                )
                end = row["curve"][-1]["loss"]
                lines.append(
                    f"| `{row['name']}` | {row['factor']} | {end:.3f} | {told} |"
                )
        return "\n".join(lines)


def there(row: dict[str, Any], target: float) -> float:
    """Seconds until a curve is first at or below the target, by straight lines."""
    before = None
    for point in row["curve"]:
        if point["loss"] <= target:
            if before is None:
                return float(point["seconds"])
            share = (before["loss"] - target) / (before["loss"] - point["loss"])
            return float(
                before["seconds"] + share * (point["seconds"] - before["seconds"])
            )
        before = point
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tune", "race", "table"))
    parser.add_argument("--workload", default="gpt-small")
    parser.add_argument("--schemes", default=OURS, help="of gradtide, commas between")
    parser.add_argument("--rivals", default=";".join(RIVALS), help="semicolons between")
    parser.add_argument("--rate", default="none", help="as the lab was told")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    league = League(args)
    if args.what == "table":
        print(league.table())
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Threshold()(torch.randn(4096), 40, {})  # compiled here, and on nobody's clock
    names = [name for name in args.rivals.split(";") if name]
    ours = split_schemes(args.schemes) if args.schemes else ()
    for name in [*names, *ours]:
        if args.what == "tune":
            for factor in TIMES:
                league.run("tuned", name=name, factor=factor)
        else:
            factor = league.factor(name)
            league.run(
                "races", name=name, factor=factor, rate=args.rate, seed=args.seed
            )
    if dist.get_rank() == 0:
        print(league.table())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
