"""Ranks that skip steps at random, under weights that differ: do they stay alike?

    torchrun --nproc-per-node 3 benchmarks/skips.py \
        --out benchmarks/records/skips_202611.json

Three ranks have 1, 50 and 3 samples in turn, which they give as weights. In each step
each of them skips by chance, before its forward or after it, sometimes all do; with a
GradScaler and clipping. After all steps parameters have to be alike on all ranks, and
under exact schemes those of one process on the samples of all that did not skip.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtide
from gradtide.lab.record import commit, machine, versions

COUNTS = (1, 50, 3)
CLIP = 0.05
EXACT = ("wfbp", "dear")
SCHEMES = (
    *EXACT,
    "dear(wire='bf16')",
    "topka2a(0.02, schedule='local', warmup=60, wire='e3m0')",
    "exdyna(0.01, schedule='local', warmup=240, wire='e3m0')",
    "exdyna(0.01, warmup=160)",
    "Scheme(Dense(), schedule=Schedule('step', every=4))",
    "Scheme(TopK(0.3), schedule=Schedule('step', every=4, delay=1, fragments=2))",
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step * 1000 + rank)
    count = COUNTS[(step + rank) % len(COUNTS)]
    x = torch.randn(count, 8, generator=rng, dtype=torch.float64)
    return x, x[:, :4].sin() + 0.1 * x[:, 4:].square()


def draw(step: int, rank: int, share: float) -> tuple[bool, bool]:
    """Whether a rank skips a step, and whether it has made its forward by then."""
    rng = torch.Generator().manual_seed(step * 1000 + rank + 500)
    first, second = torch.rand(2, generator=rng).tolist()
    return first < share, second < 0.5


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = (model(x) - y).square().mean()
    return found


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def optimizer_of(model: nn.Module, scheme: str) -> torch.optim.Optimizer:
    if scheme.startswith("exdyna") and "local" not in scheme:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(scheme: str, steps: int, share: float) -> tuple[Tensor, int, int]:
    """Parameters at the end, the steps that were counted, and how often one skipped."""
    rank, model, skipped = dist.get_rank(), network(), 0
    optimizer = optimizer_of(model, scheme)
    sync = gradtide.replicate(model, optimizer, scheme, check_every=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # it has a scale, whoever skips the first step
    for step in range(steps):
        x, y = batch(step, rank)
        skips, late = draw(step, rank, share)
        sync.weight(len(x))
        if late or not skips:
            value = loss(model, x, y)
        if skips:
            skipped += 1
            sync.skip()
        else:
            scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        sync.clip_grad_norm_(CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    sync.end_round()
    sync.flush()
    found, counted = flat(model), int(sync.metrics()["step"])
    sync.remove()
    return found, counted, skipped


def one_process(steps: int, share: float) -> Tensor:
    model = network()
    optimizer = optimizer_of(model, "")
    for step in range(steps):
        ranks = [r for r in range(dist.get_world_size()) if not draw(step, r, share)[0]]
        if not ranks:
            continue
        data = zip(*(batch(step, rank) for rank in ranks), strict=True)
        optimizer.zero_grad()
        loss(model, *map(torch.cat, data)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return flat(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--share", type=float, default=0.3, help="of steps skipped")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rows: list[dict[str, Any]] = []
    for scheme in SCHEMES:
        begin = time.perf_counter()
        found, counted, skipped = train(scheme, args.steps, args.share)
        told: list[Any] = [None] * size
        dist.all_gather_object(told, (found.numpy().tobytes(), counted, skipped))
        row = {
            "scheme": scheme,
            "alike": len({(held, count) for held, count, _ in told}) == 1,
            "steps": counted,
            "skipped": [own for *_, own in told],
            "seconds": round(time.perf_counter() - begin, 1),
        }
        if scheme in EXACT:
            one = one_process(args.steps, args.share)
            row["from_one_process"] = float((found - one).abs().max())
        rows.append(row)
        if rank == 0:
            print(row, flush=True)
    if rank == 0 and args.out is not None:
        how = vars(args) | {"out": args.out.name, "ranks": size}
        about = {"commit": commit(), "versions": versions(), "machine": machine()}
        args.out.write_text(json.dumps({**how, **about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
