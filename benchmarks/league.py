"""The league: time to a loss, for gradtide's schemes and for their rivals.

    OUT=benchmarks/records/league.json
    torchrun --nproc-per-node 4 benchmarks/league.py tune --out $OUT
    gradtide lab run --hosts 4 --rate 50mbit -- \
        python benchmarks/league.py pace --rate 50mbit --out $OUT
    gradtide lab run --hosts 4 --rate 50mbit -- \
        python benchmarks/league.py race --rate 50mbit --out $OUT
    python benchmarks/league.py table --out $OUT

Everybody gets the same model, seed, data and number of steps. `tune` trains each at
three learning rates on loopback, and beyond them where the best is at their edge, and
keeps the one at which the held-out loss ends lowest; with `--seeds 3` it trains there
from more seeds, whose curves are averaged.
`race` trains at that rate over shaped links, one after the other, with the clock of
training alone. `pace` is for links over which that would take hours: it times a
training of a few steps whose warm-up is as short in proportion, and its clock,
stretched, is put to the curve that the contestant had on loopback; `predict` makes
such clocks for links with a delay and writes nothing. The target is the
loss at which tuned DDP ends, and half a per cent more; the table says how much sooner
than DDP each is there. What the record holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from rivals import RIVALS, Entrant, Make, last_dense, scheme

from gradtide.lab.record import machine, versions
from gradtide.lab.spec import split_schemes
from gradtide.lab.workloads import Workload, build
from gradtide.selectors import Threshold

TIMES = (0.5, 1.0, 2.0)  # the workload's learning rate
WIDEST = 8.0  # times that rate, and as small a part of it
OURS = ",".join(
    (
        "wfbp(wire='bf16')",
        "wfbp(wire='e3m0')",
        "exdyna(0.01, schedule='local', warmup=120, wire='e3m0')",
        "topka2a(0.02, schedule='local', warmup=120, wire='e3m0')",
    )
)


# Messages that wait for each other in a step: in a dense first phase, how long that is
# of all, and afterwards. Of Gloo's as many as such requests took in the lab
# (`hops.py`), not as many as are needed.
WAITS = {
    "ddp": (14, 0.0, 14),
    "ddp bf16": (14, 0.0, 14),
    "powersgd hook, rank 32": (14, 0.1, 42),
    "1-bit adam": (14, 0.2, 18),
    "wfbp": (2, 0.0, 2),
    "exdyna": (2, 0.4, 4),
    "topka2a": (2, 0.4, 3),
}


def make(name: str, share: float = 1.0) -> Make:
    """A rival by its name, or a scheme by its text, with a share of its warm-up."""
    return RIVALS.get(name) or scheme(name, share)


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


def pace(workload: str, name: str, steps: int, whole: int) -> list[float]:
    """Seconds of each of so many steps, with phases as long in proportion as of the
    whole training.

    The first two steps, in which buffers are made, count as the third does.
    """
    work = build(workload, rank=dist.get_rank(), size=dist.get_world_size(), seed=0)
    made = make(name, steps / whole)
    entrant = made(work.model, work.optimizer, steps, work.max_norm or 1e9)
    laps = []
    try:
        dist.barrier()
        for step in range(steps):
            begin = time.perf_counter()
            work.loss(entrant.module, work.batch(step)).backward()  # type: ignore[no-untyped-call]
            entrant.step()
            if step + 1 == steps:
                entrant.settle()
                dist.barrier()
            laps.append(round(time.perf_counter() - begin, 4))
    finally:
        entrant.leave()
    return [laps[2], laps[2], *laps[2:]]


def stretched(
    laps: list[float], curve: list[dict[str, Any]], once: int | None
) -> list[dict[str, Any]]:
    """A curve over steps with the seconds that steps like these take.

    What step `once` takes longer than the one before it, a training has but once.
    """
    steps, extra = list(laps), 0.0
    if once:
        extra = max(0.0, laps[once] - laps[once - 1])
        steps[once] -= extra
    factor = curve[-1]["step"] / len(steps)
    ends: list[float] = [0.0, *accumulate(steps)]

    def seconds(step: int) -> float:
        whole = min(int(step / factor), len(steps) - 1)
        done = factor * (ends[whole] + (step / factor - whole) * steps[whole])
        return float(round(done + extra * (once is not None and whole >= once), 3))

    return [point | {"seconds": seconds(point["step"])} for point in curve]


def averaged(curves: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The mean loss at every step, over seeds."""
    return [
        {"step": points[0]["step"], "loss": mean(p["loss"] for p in points)}
        for points in zip(*curves, strict=True)
    ]


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
            "seeds": [],
            "paces": [],
            "races": [],
        }
        if args.out.exists():
            known = json.loads(args.out.read_text())
            self.record = known | {
                key: self.record[key] for key in ("versions", "machine")
            }

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

    def tune(self, name: str) -> None:
        """Train at several rates, and beyond them where the best is at their edge."""
        for factor in TIMES:
            self.run("tuned", name=name, factor=factor)
        tried = list(TIMES)
        while (best := self.best(name)["factor"]) in (tried[0], tried[-1]):
            lower = best == tried[0]
            further = best / 2 if lower else best * 2
            if not 1 / WIDEST <= further <= WIDEST:
                return
            tried.insert(0 if lower else len(tried), further)
            self.run("tuned", name=name, factor=further)

    def more_seeds(self, name: str) -> None:
        """Train at the best rate from other seeds, too."""
        factor = self.best(name)["factor"]
        for seed in range(1, self.args.seeds):
            self.run("seeds", name=name, factor=factor, seed=seed)

    def pace(self, name: str, rate: str) -> None:
        """Time a few steps, unless the record has them."""
        rows, args = self.record["paces"], self.args
        if any((row["name"], row["rate"]) == (name, rate) for row in rows):
            return
        laps = pace(args.workload, name, args.paced, args.steps)
        rows.append({"name": name, "rate": rate, "laps": laps})
        if dist.get_rank() == 0:
            print(f"{name}, {rate}: {sum(laps) / len(laps):.3f} s a step", flush=True)
            args.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def predict(self, way: float) -> None:
        """Paces over links on which a message is under way for so many seconds.

        They are those that the record has of the same links without that, and what
        waits.
        """
        for row in [*self.record["paces"]]:
            name, laps = row["name"], row["laps"]
            known = WAITS.get(name) or WAITS.get(name.split("(")[0])
            if known is None or "," in row["rate"]:
                continue
            dense, share, after = known
            late = [
                lap + way * (dense if i < share * len(laps) else after)
                for i, lap in enumerate(laps)
            ]
            rate = f"{row['rate']}, {2e3 * way:g}ms, predicted"
            self.record["paces"].append({"name": name, "rate": rate, "laps": late})

    def learned(self, name: str) -> dict[str, Any]:
        """The curve that a contestant's paces are put to, and its `factor`."""
        if not self.args.curves:
            best = self.best(name)
            key = name, best["factor"]
            more = [r for r in self.record["seeds"] if (r["name"], r["factor"]) == key]
            return best | {"curve": averaged([row["curve"] for row in [best, *more]])}
        records = [json.loads(path.read_text()) for path in self.args.curves]
        runs = [run for record in records for run in record["runs"]]
        whose = name if any(run["scheme"] == name for run in runs) else self.args.target
        curves = [run["curve"] for run in runs if run["scheme"] == whose]
        return {"curve": averaged(curves), "factor": 1.0, "name": whose}

    def best(self, name: str) -> dict[str, Any]:
        """The training that ended lowest, of a contestant's at several rates."""
        rows = [row for row in self.record["tuned"] if row["name"] == name]
        if not rows:
            raise SystemExit(f"{name} was not tuned: run `league.py tune` first")
        return min(rows, key=lambda row: float(row["curve"][-1]["loss"]))

    def raced(self) -> list[dict[str, Any]]:
        """Races that were run, and those that paces and curves make."""
        rows = [dict(row) for row in self.record["races"]]
        for row in self.record["paces"]:
            name, laps = row["name"], row["laps"]
            found, share = self.learned(name), len(laps) / self.record["steps"]
            curve = stretched(laps, found["curve"], last_dense(name, share))
            where = {"rate": f"{row['rate']}, by paces", "factor": found["factor"]}
            # Who has learned nothing here is shown with the curve of another.
            lent = (
                "" if found["name"] == name else f" with the curve of {found['name']}"
            )
            rows.append({"name": name + lent, "curve": curve} | where)
        return rows

    def table(self) -> str:
        """Who is at the target when, for each rate of links."""
        lines, raced = [], self.raced()
        for rate in sorted({row["rate"] for row in raced}):
            rows = [row for row in raced if row["rate"] == rate]
            rivals = [r for r in rows if r["name"] == self.args.target]
            if not rivals:
                continue
            target = mean(r["curve"][-1]["loss"] for r in rivals) * self.args.margin
            first = mean(
                min(there(r, target), float(r["curve"][-1]["seconds"])) for r in rivals
            )
            lines += [f"\n{rate}, target {target:.3f}\n"]
            lines += ["| contestant | rate x | ends at | there after | sooner |"]
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
    parser.add_argument("what", choices=("tune", "pace", "race", "predict", "table"))
    parser.add_argument("--workload", default="gpt-small")
    parser.add_argument("--schemes", default=OURS, help="of gradtide, commas between")
    parser.add_argument("--rivals", default=";".join(RIVALS), help="semicolons between")
    parser.add_argument("--rate", default="none", help="as the lab was told")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--target", default="ddp", help="whose final loss it is")
    parser.add_argument("--margin", type=float, default=1.005, help="times its loss")
    parser.add_argument(
        "--curves", nargs="*", type=Path, default=[], help="learning.py's, not tuned"
    )
    parser.add_argument("--paced", type=int, default=40, help="steps that are timed")
    parser.add_argument("--ways", type=float, nargs="*", default=[0.02, 0.05])
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of a race")
    parser.add_argument("--seeds", type=int, default=1, help="at the best rate")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    league = League(args)
    if args.what == "predict":
        for way in args.ways:
            league.predict(way)
    if args.what in ("predict", "table"):
        print(league.table())
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Threshold()(torch.randn(4096), 40, {})  # compiled here, and on nobody's clock
    names = [name for name in args.rivals.split(";") if name]
    ours = split_schemes(args.schemes) if args.schemes else ()
    for name in [*names, *ours]:
        if args.what == "tune":
            league.tune(name)
            league.more_seeds(name)
        elif args.what == "pace":
            league.pace(name, args.rate)
        else:
            factor = league.best(name)["factor"]
            league.run(
                "races", name=name, factor=factor, rate=args.rate, seed=args.seed
            )
    if dist.get_rank() == 0 and args.what != "pace":
        print(league.table())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
