"""K-FAC on many ranks against one process, and what its factors send: on every rank.

    gradtide lab run --hosts 4 --rate 1gbit -- \
        python benchmarks/curvature.py --out benchmarks/records/curvature_p4.json

Trains a small network from the same seed under every distribution, and on rank 0 alone
on the whole batch; with and without DEAR, and with measured placement (which may differ
from run to run, and so may the last digits). Reported are the 2-norms of differences of
all parameters over the 2-norm of all parameters. (The name of this file is not that of
a package which `curvature_contest.py` imports.)

Bytes of factors are those that leave the interface in steps with new factors and old
inverses, less those in steps with neither.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradtide
from gradtide.lab.record import commit, machine, versions
from gradtide.lab.trial import link_bytes
from gradtide.lab.workloads import digits
from gradtide.transport import ProcessGroup

NAMES = ("mpd", "spd", "pad", "dp")
BATCH = 96  # of all ranks together: even for 1, 2, 3, 4 and 8
NEVER = 1000  # steps: more than are taken


def network() -> nn.Sequential:
    """Without norms, whose statistics would be those of a rank's own samples."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.Tanh(),
        nn.Flatten(), nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 10),
    )  # fmt: skip


class Training:
    """One rank's part of a run; `group` of one rank takes the whole batch."""

    def __init__(self, scheme: str, group: ProcessGroup | None = None) -> None:
        self.model, (self.data, _) = network(), digits.images()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.sync = gradtide.replicate(
            self.model, self.opt, scheme, process_group=group
        )
        self.step = 0

    def go(self, steps: int) -> None:
        for _ in range(steps):
            each = BATCH // self.size
            x, y = digits.shard(self.data, 0, self.rank, self.size, each, self.step)
            cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
        self.sync.flush()

    def end(self) -> Tensor:
        """All parameters in float64."""
        self.sync.remove()
        flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        return flat.double()


def trained(scheme: str, steps: int, group: ProcessGroup | None = None) -> Tensor:
    training = Training(scheme, group)
    training.go(steps)
    return training.end()


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def equality(steps: int) -> dict[str, Any]:
    """Distances on rank 0; raises AssertionError where ranks differ."""
    alone = dist.new_group([0])
    one = torch.zeros(0)
    if dist.get_rank() == 0:
        one = trained("spd_kfac", steps, alone)
    found = {}
    for name in NAMES:
        for setting in ("", "(schedule='dear')", "(placement='measured')"):
            recipe = f"{name}_kfac{setting}"
            found[recipe] = weights = trained(recipe, steps)
            first = weights.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, weights), f"{recipe}: ranks differ"
    if dist.get_rank():
        return {}
    result: dict[str, Any] = {}
    for recipe, weights in found.items():
        result[recipe] = row = {}
        if "schedule" in recipe:
            row["from wfbp"] = distance(weights, found[recipe.partition("(")[0]])
        if not recipe.startswith("dp"):
            row["from one process"] = distance(weights, one)
            row["from mpd"] = distance(weights, found["mpd_kfac"])
    return result


def sent(scheme: str, steps: int, interface: str) -> tuple[float, float]:
    """Bytes a step: of the interface, and of the payload of factors."""
    training = Training(scheme)
    training.go(3)  # the first inverses travel, and buckets are settled
    training.sync.engine.telemetry.clear()
    dist.barrier()
    before = link_bytes(interface)
    training.go(steps)
    dist.barrier()
    link = link_bytes(interface) - before
    payload = sum(
        record.payload_bytes
        for record in training.sync.engine.telemetry.records
        if record.bucket.startswith(("kfac.A", "kfac.G"))
    )
    training.end()
    totals = torch.tensor([link, payload], dtype=torch.float64) / steps
    dist.all_reduce(totals)
    return tuple((totals / dist.get_world_size()).tolist())


def traffic(steps: int) -> dict[str, Any]:
    """Mean bytes of a rank and step."""
    link = os.environ.get("GRADTIDE_LAB_INTERFACE", "")
    result: dict[str, Any] = {}
    for name in NAMES:
        every, never = (
            sent(f"{name}_kfac(factor_every={n}, inverse_every={NEVER})", steps, link)
            for n in (1, NEVER)
        )
        result[name] = {"interface": every[0] - never[0], "payload": every[1]}
    for row in result.values():
        for what in ("interface", "payload"):
            whole = result["mpd"][what]
            row[f"{what} of mpd's"] = row[what] / whole if whole else None
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    found = {"equality": equality(args.steps), "factor_bytes": traffic(args.steps)}
    if dist.get_rank() == 0:
        record = {
            "command": f"python benchmarks/curvature.py --steps {args.steps}",
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            "ranks": dist.get_world_size(),
            "interface": os.environ.get("GRADTIDE_LAB_INTERFACE", ""),
            **found,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
