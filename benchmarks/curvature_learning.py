"""Steps to a target loss with SGD, AdamW and K-FAC, and what steps take on many ranks.

    gradtide lab run --hosts 1 --rate none -- python benchmarks/curvature_learning.py \
        --out benchmarks/records/curvature_learning.json
    gradtide lab run --hosts 4 --rate 100mbit -- \
        python benchmarks/curvature_learning.py --times \
        --out benchmarks/records/curvature_learning.json

The first trains two tasks on scikit-learn's digits in one process, with the batch of
four ranks: the convolutions of the workload `digits`, and an autoencoder (64-128-32-8
and back). Every hyper-parameter of a small grid runs with seed 0, the best of each
optimizer with all seeds. A run has reached the target when the loss over the whole
training set, in evaluation mode, is at most that; it is computed every EVERY steps.

The second times steps of every distribution, and adds times to the target: median steps
of the seeds by median seconds of a step. Runs that the record holds are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import gradtide
from gradtide.lab.record import commit, machine, versions
from gradtide.lab.workloads import digits
from gradtide.lab.workloads.workload import seeded

BATCH = 128  # of all ranks together
EVERY = 2  # steps between evaluations
SETTLE = 5  # steps before time is taken
DISTRIBUTIONS = ("mpd", "spd", "pad", "dp")


def autoencoder() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise((64, 128, 32, 8, 32, 128, 64)):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def reconstruction(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Squared error of an image, as a mean over images."""
    return F.mse_loss(model(x), x.flatten(1), reduction="none").sum(1).mean()


def classification(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@dataclass(frozen=True)
class Task:
    network: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    target: float


TASKS = {
    "digits": Task(digits.network, classification, 0.02),
    "autoencoder": Task(autoencoder, reconstruction, 1.2),
}
DAMPINGS = (0.1, 0.03, 0.01, 0.003, 0.001)
Setting = tuple[float, ...]  # learning rate; of K-FAC also damping and kl_clip, 0: none
GRIDS: dict[str, list[Setting]] = {
    "sgd": [(lr,) for lr in (0.3, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)],
    "adamw": [(lr,) for lr in (0.03, 0.01, 0.005, 0.002, 0.001)],
    # Where the clip is at work, the learning rate is not.
    "kfac": [
        *((0.1, d, clip) for clip in (0.003, 0.001, 0.0003) for d in DAMPINGS),
        *((lr, d, 0.0) for lr in (0.03, 0.01) for d in DAMPINGS[:2]),
    ],
}


def optimizer(kind: str, model: nn.Module, lr: float) -> Optimizer:
    if kind == "adamw":
        return AdamW(model.parameters(), lr=lr)
    return SGD(model.parameters(), lr=lr, momentum=0.9)


def scheme(kind: str, setting: Setting, distribution: str = "spd") -> str:
    if kind != "kfac":
        return "wfbp"
    _, damping, clip = setting
    named = f"damping={damping}, kl_clip={clip or None}, placement='measured'"
    return f"{distribution}_kfac({named})"


def train(
    task: Task, kind: str, setting: Setting, seed: int, most: int
) -> dict[str, Any]:
    """Until the target or `most` steps, in this process alone."""
    (x, y), _ = data = digits.images()
    with seeded(seed):
        model = task.network()
    opt = optimizer(kind, model, setting[0])
    sync = gradtide.replicate(model, opt, scheme(kind, setting))
    curve: list[list[float]] = []
    for step in range(1, most + 1):
        own = digits.shard(data[0], seed, 0, 1, BATCH, step - 1)
        task.loss(model, *own).backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
        if step % EVERY == 0:
            model.eval()
            with torch.no_grad():
                curve.append([step, task.loss(model, x, y).item()])
            model.train()
            if not curve[-1][1] < 1e3 or curve[-1][1] <= task.target:
                break
    sync.remove()
    reached = curve[-1][1] <= task.target
    return {"seed": seed, "steps": curve[-1][0] if reached else None, "curve": curve}


def learn(record: dict[str, Any], args: argparse.Namespace, save: Any) -> None:
    """The grid with the first seed, the best of it with all."""
    runs = record["runs"]

    def run(name: str, kind: str, setting: Setting, seed: int) -> dict[str, Any]:
        key = {"task": name, "optimizer": kind, "setting": list(setting), "seed": seed}
        for known in runs:
            if key.items() <= known.items():
                return dict(known)
        found = {**key, **train(TASKS[name], kind, setting, seed, args.steps)}
        runs.append(found)
        print({**key, "steps": found["steps"]}, flush=True)
        save()
        return found

    for name, (kind, grid) in itertools.product(args.tasks.split(), GRIDS.items()):
        tried = [run(name, kind, each, 0) for each in grid]
        best = min(
            tried, key=lambda r: (r["steps"] or args.steps + 1, r["curve"][-1][1])
        )
        setting = tuple(best["setting"])
        steps = [
            run(name, kind, setting, seed)["steps"] or args.steps + 1
            for seed in range(args.seeds)
        ]
        record["best"].setdefault(name, {})[kind] = {
            "setting": list(setting),
            "steps": steps,
            "median": median(steps),
        }
        save()


def seconds(task: Task, kind: str, setting: Setting, name: str, steps: int) -> float:
    """Median of a step, as rank 0 has it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    (train_set, _), times = digits.images(), []
    with seeded(0):
        model = task.network()
    opt = optimizer(kind, model, setting[0])
    sync = gradtide.replicate(model, opt, scheme(kind, setting, name))
    for step in range(SETTLE + steps):
        begin = time.perf_counter()
        own = digits.shard(train_set, 0, rank, size, BATCH // size, step)
        task.loss(model, *own).backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
        times.append(time.perf_counter() - begin)
    sync.remove()
    return median(times[SETTLE:])


def measure(record: dict[str, Any], args: argparse.Namespace, save: Any) -> None:
    """Seconds of a step, and to the target."""
    for name in args.tasks.split():
        for kind, best in record["best"][name].items():
            names = DISTRIBUTIONS if kind == "kfac" else ("",)
            for distribution in names:
                setting = tuple(best["setting"])
                step = seconds(TASKS[name], kind, setting, distribution, args.timed)
                row = {"step_seconds": step, "to_target": step * best["median"]}
                label = f"{kind} {distribution}".strip()
                record["times"].setdefault(name, {})[label] = row
                if dist.get_rank() == 0:
                    print(name, label, row, flush=True)
    save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="digits autoencoder")
    parser.add_argument("--steps", type=int, default=2000, help="at most, a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--times", action="store_true", help="time steps on all ranks")
    parser.add_argument("--timed", type=int, default=20, help="steps")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if not args.times and dist.get_world_size() > 1:
        parser.error("one process learns; --times is for several")
    record: dict[str, Any] = {"runs": [], "best": {}, "times": {}}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    dist.barrier()  # everybody has read it before it is written
    record |= {
        "command": f"python benchmarks/curvature_learning.py --steps {args.steps} "
        f"--seeds {args.seeds}; with --times on ranks",
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "targets": {name: task.target for name, task in TASKS.items()},
    }
    if args.times:
        record["ranks"] = dist.get_world_size()

    def save() -> None:
        if dist.get_rank() == 0:
            args.out.write_text(json.dumps(record, indent=1) + "\n")

    (measure if args.times else learn)(record, args, save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
