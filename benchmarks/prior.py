"""How many more steps each recipe needs to the same loss, on five tasks.

    torchrun --nproc-per-node 4 benchmarks/prior.py \
        --out benchmarks/records/prior_202611.json

The losses after 400 steps are those of the ablation (its record). Here dense training
is run with fewer and with more steps, each with its own decay of the learning rate, at
the same learning rate: so a loss is as good as a number of dense steps. A recipe that
ends after 400 steps where dense training ends after 360 needs 11 % more. Losses beyond
the curve count as its end.

The planner's prior (`gradtide.planner.prior`) is what this prints. Numbers do not
depend on how fast the machine is. What the record holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
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


def as_it_is(record: dict[str, Any], task: str, scheme: str) -> list[float]:
    """Losses after all steps, by seed."""
    rate = rates(record)[task]
    return [
        r["loss"]
        for r in record["runs"]
        if (r["task"], r["scheme"], r["variant"], r["rate"])
        == (task, scheme, "as it is", rate)
    ]


def curves(own: dict[str, Any], record: dict[str, Any]) -> dict[str, list[float]]:
    """For each task the mean loss of dense training by LENGTHS."""
    return {
        task: [
            fmean(
                as_it_is(record, task, DENSE)
                if length == record["steps"]
                else [
                    r["loss"]
                    for r in own["runs"]
                    if (r["task"], r["steps"]) == (task, length)
                ]
            )
            for length in LENGTHS
        ]
        for task in rates(record)
    }


def costs(own: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """For each scheme and task, the share of more steps, by seed."""
    record = ablation()
    names = dict.fromkeys(r["scheme"] for r in record["runs"])
    along = curves(own, record)
    return {
        name: {
            task: [
                record["steps"] / dense_steps(curve, loss) - 1
                for loss in as_it_is(record, task, name)
            ]
            for task, curve in along.items()
        }
        for name in names
        if name != DENSE
    }


def dense_steps(curve: Sequence[float], loss: float) -> float:
    """How many dense steps end at a loss: between LENGTHS, on a logarithmic scale."""
    falling = np.minimum.accumulate(np.asarray(curve))
    logs = np.interp(-loss, -falling, np.log(LENGTHS))
    return float(np.exp(logs))


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The median over tasks, the least and the most of a task, and how many there are.

    Of a task the mean over its seeds counts.
    """
    rows = {}
    for name, tasks in found.items():
        means = [fmean(each) for each in tasks.values() if each]
        rows[name] = {
            "typical": round(median(means), 3),
            "least": round(min(means), 3),
            "most": round(max(means), 3),
            "tasks": len(means),
        }
    return rows


def missing(own: dict[str, Any], record: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Runs that are still to be made: tasks and steps, seed by seed."""
    for seed in range(SEEDS):
        for length in LENGTHS:
            for task in rates(record):
                done = [
                    r for r in own["runs"] if (r["task"], r["steps"]) == (task, length)
                ]
                if length != record["steps"] and len(done) <= seed:
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
    for task, length in [*missing(own, record)]:
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
        own |= {"costs": found, "summary": summary(found)}
        args.out.write_text(json.dumps(own, indent=1) + "\n")
        print(json.dumps(own["summary"], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
