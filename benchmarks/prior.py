"""How many more steps each recipe needs to the same loss, on five tasks.

    torchrun --nproc-per-node 4 benchmarks/prior.py \
        --out benchmarks/records/prior_202611.json

The losses after 400 steps are those of the ablation (its record). Here dense training
is run with fewer and with more steps, each with its own decay of the learning rate, at
the same learning rate: so a loss is as good as a number of dense steps. A recipe that
ends after 400 steps where dense training ends after 360 needs 11 % more. It is compared
with dense training from the same seed. Losses beyond the curve count as its end. Where
dense training is no better for more steps, nothing can be said in steps: such tasks are
left out, and named.

The planner's prior (`gradtide.planner.prior`) is what this prints. Numbers do not
depend on how fast the machine is. What the record holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

RECORDS = Path(__file__).with_name("records")
ABLATION = RECORDS / "ablation_202611.json"
DENSE = "wfbp"
LENGTHS = (160, 220, 280, 340, 400, 480, 580)  # steps of dense training
SEEDS = 2  # of each length that the ablation has not


def ablation() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ABLATION.read_text())
    return found


def rates(record: dict[str, Any]) -> dict[str, float]:
    """The learning rate of each task at which all recipes were compared."""
    return {r["task"]: r["rate"] for r in record["runs"] if r["scheme"] == "exdyna"}


def as_it_is(record: dict[str, Any], task: str, scheme: str) -> dict[int, float]:
    """Losses after all steps, by seed."""
    rate = rates(record)[task]
    return {
        r["seed"]: r["loss"]
        for r in record["runs"]
        if (r["task"], r["scheme"], r["variant"], r["rate"])
        == (task, scheme, "as it is", rate)
    }


def curve(own: dict[str, Any], record: dict[str, Any], task: str) -> list[float]:
    """The mean loss of dense training by LENGTHS; NaN where there is no run yet."""
    means = []
    for length in LENGTHS:
        found = [*as_it_is(record, task, DENSE).values()]
        if length != record["steps"]:
            found = losses(own, task, length)
        means.append(fmean(found) if found else math.nan)
    return means


def losses(own: dict[str, Any], task: str, length: int) -> list[float]:
    """Of the runs that were made here."""
    return [r["loss"] for r in own["runs"] if (r["task"], r["steps"]) == (task, length)]


def tells(along: Sequence[float]) -> bool:
    """Whether more steps have always been better."""
    return all(later < before for before, later in pairwise(along))


def costs(own: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """For each scheme and task, the share of more steps, by seed."""
    record = ablation()
    steps, at = record["steps"], LENGTHS.index(record["steps"])
    names = dict.fromkeys(r["scheme"] for r in record["runs"])
    found: dict[str, dict[str, list[float]]] = {n: {} for n in names if n != DENSE}
    for task in rates(record):
        along, dense = curve(own, record, task), as_it_is(record, task, DENSE)
        if not tells(along):
            continue
        for name, tasks in found.items():
            above = [
                loss - dense[seed]
                for seed, loss in as_it_is(record, task, name).items()
            ]
            tasks[task] = [
                steps / dense_steps(along, along[at] + more) - 1 for more in above
            ]
    return found


def dense_steps(along: Sequence[float], loss: float) -> float:
    """How many dense steps end at a loss: between LENGTHS, on a logarithmic scale."""
    logs = np.interp(-loss, -np.asarray(along), np.log(LENGTHS))
    return float(np.exp(logs))


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The median over tasks of their means; the least and the most of any run."""
    rows = {}
    for name, tasks in found.items():
        means = [fmean(each) for each in tasks.values() if each]
        rows[name] = {
            "typical": round(median(means), 3),
            "least": round(min(map(min, tasks.values())), 3),
            "most": round(max(map(max, tasks.values())), 3),
            "tasks": len(means),
        }
    return rows


def missing(own: dict[str, Any], record: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Runs that are still to be made: tasks and steps, seed by seed.

    Further seeds are for tasks of which the first one tells something.
    """
    others = [length for length in LENGTHS if length != record["steps"]]
    for seed in range(SEEDS):
        for length, task in product(others, rates(record)):
            if seed and not tells(curve(own, record, task)):
                continue
            if len(losses(own, task, length)) <= seed:
                yield task, length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    import ablation as program

    from gradtide.lab.record import machine, versions
    from gradtide.scheme import parse

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    record = ablation()
    own: dict[str, Any] = {
        "command": "torchrun --nproc-per-node 4 benchmarks/prior.py",
        "versions": versions(),
        "machine": machine(),
        "runs": [],
    }
    if args.out.exists():
        own = json.loads(args.out.read_text())
    dist.barrier()
    for task, length in missing(own, record):
        rate = rates(record)[task]
        seed = sum((r["task"], r["steps"]) == (task, length) for r in own["runs"])
        loss = program.train(task, parse(DENSE), rate, seed, length)
        run = {"task": task, "steps": length, "rate": rate, "seed": seed, "loss": loss}
        own["runs"].append(run)
        if dist.get_rank() == 0:
            print(run, flush=True)
            args.out.write_text(json.dumps(own, indent=1) + "\n")
    if dist.get_rank() == 0:
        found = costs(own)
        left_out = [t for t in rates(record) if not tells(curve(own, record, t))]
        own |= {"left out": left_out, "costs": found, "summary": summary(found)}
        args.out.write_text(json.dumps(own, indent=1) + "\n")
        print(json.dumps(own["summary"], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
