"""Steps of distributed K-FAC, and of the package kfac-pytorch: run on every rank.

    gradtide lab run --hosts 4 --rate 100mbit -- \
        python benchmarks/curvature_contest.py \
        --out benchmarks/records/curvature_contest_4x100mbit.json

Every contestant trains its own copy of one residual network (three stages of basic
blocks, as for CIFAR) on the same noise, with new factors and inverses in every step.
Factors, inverses and messages are real. Of forward and backward only a small batch is
computed; a wait in every block stands for an accelerator that computes the rest, while
the processor is free for factors and inversions.
Contestants alternate, see [Note: What is timed] in `gradtide.lab.trial`. A step's time
is that of its slowest rank.

kfac-pytorch takes part if it can be imported, behind DistributedDataParallel at its
best, in its modes COMM-OPT, HYBRID and MEM-OPT with symmetry-aware transfers and
inverses, as ours. Its buckets of factors are of 25 MB, as it has them by default: more
than all factors together, so that nothing overlaps; and of 0.25 MB. (HYBRID shares out
half of the ranks, so their number has to be even.)
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from gradtide.lab.contestants import Contestant, enter
from gradtide.lab.record import commit, machine, versions
from gradtide.lab.trial import Trial, compete
from gradtide.lab.workloads import Workload
from gradtide.lab.workloads.workload import TRAIN, seeded, stream

SETTING = "damping=0.003, decay=0.95, kl_clip=0.001, placement='measured'"
NAMES = ("mpd", "spd", "pad", "dp")
# "pad" chooses between one gradient worker a layer, as the package in its MEM-OPT, and
# all ranks, which the last is given.
SCHEMES = "; ".join(
    [
        "wfbp",
        *(f"{name}_kfac({SETTING})" for name in NAMES),
        f"pad_kfac({SETTING}, workers=1.0)",
    ]
)
SIDE = 16  # pixels
RATE = 1e-4
BUCKETS = (25.0, 0.25)  # MB, of the package


class Wait(torch.autograd.Function):
    """Nothing but time, `seconds` forward and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, width: int, stride: int, seconds: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.around: nn.Module = nn.Identity()
        if inputs != width:
            self.around = nn.Conv2d(inputs, width, 1, stride, bias=False)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)) + self.around(x))
        return Wait.apply(y, self.seconds)  # type: ignore[no-any-return,no-untyped-call]


def network(width: int, blocks: int, step_ms: float) -> nn.Sequential:
    """3 stages of `blocks` blocks with `width`, 2 and 4 times as many channels."""
    seconds = step_ms / 1e3 / 3 / (3 * blocks)

    def stages() -> Iterator[nn.Module]:
        inputs = width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                yield Block(inputs, width << stage, stride, seconds)
                inputs = width << stage

    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        *stages(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 2, 10),
    )  # fmt: skip


def workload(args: argparse.Namespace) -> Workload:
    rank = dist.get_rank()
    with seeded(0):
        model = network(args.width, args.blocks, args.step_ms)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        dice = stream(TRAIN, 0, rank, step)
        x = dice.standard_normal((args.batch, 3, SIDE, SIDE), np.float32)
        return torch.from_numpy(x), torch.from_numpy(dice.integers(10, size=args.batch))

    return Workload(
        name="residual",
        model=model,
        optimizer=SGD(model.parameters(), lr=RATE, momentum=0.9),
        batch=batch,
        loss=lambda model, pair: F.cross_entropy(model(pair[0]), pair[1]),
    )


def peers(args: argparse.Namespace) -> Iterator[Contestant]:
    """kfac-pytorch in each of its modes; nobody where it is not installed."""
    if find_spec("kfac") is None:
        return
    enums, package = import_module("kfac.enums"), import_module("kfac.preconditioner")
    for strategy, megabytes in product(enums.DistributedStrategy, BUCKETS):
        own = workload(args)
        module = DistributedDataParallel(
            own.model, gradient_as_bucket_view=True, static_graph=True
        )
        peer = package.KFACPreconditioner(
            own.model,
            factor_update_steps=1,
            inv_update_steps=1,
            damping=0.003,
            factor_decay=0.95,
            kl_clip=0.001,
            lr=RATE,
            allreduce_bucket_cap_mb=megabytes,
            compute_method=enums.ComputeMethod.INVERSE,
            grad_worker_fraction=strategy,
            symmetry_aware=True,
        )
        own.optimizer.register_step_pre_hook(lambda *_, p=peer: p.step())
        name = f"kfac-pytorch {strategy.name} {megabytes:g} MB"
        yield Contestant(name, own, module)


def package_version() -> str | None:
    try:
        return version("kfac-pytorch")
    except PackageNotFoundError:
        return None


def row(trials: list[Trial]) -> dict[str, Any]:
    """One contestant from every rank's trial; bytes and stages are means."""
    times = [
        max(step.end.time - step.begin.time for step in steps)
        for steps in zip(*(trial.timed for trial in trials), strict=True)
    ]
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    count, found = trials[0].num_steps, {}
    links = [t.interface_bytes for t in trials if t.interface_bytes is not None]
    stages = [trial.stages for trial in trials if trial.stages is not None]
    if stages:
        means = np.mean(stages, axis=0) / count
        found["stages"] = dict(zip(stages[0]._fields, means.tolist(), strict=True))
    return {
        "step_seconds": middle,
        "step_seconds_p25": low,
        "step_seconds_p75": high,
        "interface_bytes": float(np.mean(links)) / count if links else None,
        "cpu_seconds": float(np.mean([t.cpu_seconds for t in trials])) / count,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", default=SCHEMES, help="separated by ;")
    parser.add_argument("--width", type=int, default=16, help="channels, first stage")
    parser.add_argument("--blocks", type=int, default=3, help="a stage")
    parser.add_argument("--batch", type=int, default=4, help="images a rank")
    parser.add_argument("--step-ms", type=float, default=60.0, help="of waiting")
    parser.add_argument("--steps", type=int, default=9, help="timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    size, quiet = dist.get_world_size(), dist.get_rank() > 0
    names = [name.strip() for name in args.schemes.split(";")]
    contestants = [enter(name, workload(args), size) for name in names]
    contestants += peers(args)
    link = os.environ.get("GRADTIDE_LAB_INTERFACE", "")
    blocks = [args.steps // args.rounds] * args.rounds
    trials = compete(contestants, 3, blocks, link, lambda _: None)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, trials)
    for contestant in contestants:
        contestant.leave()
    if not quiet:
        results = {
            ranks[0].name: row(list(ranks)) for ranks in zip(*gathered, strict=True)
        }
        record = {
            "command": "python benchmarks/curvature_contest.py "
            + " ".join(
                f"--{name.replace('_', '-')} '{value}'"
                for name, value in vars(args).items()
                if name != "out"
            ),
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            "ranks": size,
            "rate_bits_per_s": os.environ.get("GRADTIDE_LAB_RATE") or None,
            "kfac_pytorch": package_version(),
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        for name, found in results.items():
            print(f"{name}: {1e3 * found['step_seconds']:.0f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
