"""Rounds of steps by Muon, beside rounds of steps by AdamW: the loss.

    torchrun --nproc-per-node 4 benchmarks/muon_rounds.py --seeds 2 \
        --out benchmarks/records/muon_rounds_202611.json

Four ranks train two small language models of `benchmarks/tasks.py` in rounds of ten
steps, after dense steps. Inside a round every rank steps by AdamW, or by Muon for its
matrices and AdamW for the rest (one optimizer, by `gradtide.optim.Several`). Each has
the best of its learning rates, by the loss from the first seed; the bar: Muon ends at
most as high, in the mean over seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from tasks import TASKS, build
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

import gradtide
from gradtide.lab.record import commit, machine, versions
from gradtide.optim import Several

OPTIMIZERS = ("AdamW", "Muon")
FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)  # times what dense training found best


def optimizer(model: nn.Module, name: str, rate: float) -> Optimizer:
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
    left = {id(p) for m in embeddings for p in m.parameters()}
    params = [*model.parameters()]
    two = [p for p in params if p.dim() == 2 and id(p) not in left]
    if name == "AdamW":
        return AdamW(params, rate)
    known = {*map(id, two)}
    rest = AdamW([p for p in params if id(p) not in known], rate)
    # Steps as long as AdamW's are, so that one rate is for both.
    return Several(Muon(two, rate, adjust_lr_fn="match_rms_adamw"), rest)


def train(task: str, name: str, rate: float, seed: int, args: Any) -> float:
    work = build(task, dist.get_rank(), seed, rate, args.steps)
    assert work.evaluate is not None
    assert work.scheduler is not None
    model = work.model
    opt = optimizer(model, name, rate)
    scheduler = work.scheduler(opt)
    scheme = f"diloco(every={args.every}, warmup={args.steps * 2 // 5})"
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(args.steps):
        work.loss(model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
        scheduler.step()
    sync.end_round()
    loss = work.evaluate(model)["loss"]
    sync.remove()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="manual,source")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs: list[dict[str, Any]] = []

    def run(task: str, name: str, rate: float, seed: int) -> float:
        begin = time.perf_counter()
        loss = train(task, name, rate, seed, args)
        row = {"task": task, "optimizer": name, "rate": rate, "seed": seed}
        runs.append(row | {"loss": loss})
        if dist.get_rank() == 0:
            print(row, f"{loss:.4f} in {time.perf_counter() - begin:.0f} s", flush=True)
        return loss

    summary: dict[str, dict[str, float]] = {}
    for task in args.tasks.split(","):
        known = TASKS[task].rates
        usual = known[len(known) // 2]
        for name in OPTIMIZERS:
            ends = {f * usual: run(task, name, f * usual, 0) for f in FACTORS}
            best = min(ends, key=lambda rate: ends[rate])
            losses = [ends[best]]
            losses += [run(task, name, best, seed) for seed in range(1, args.seeds)]
            summary.setdefault(task, {})[name] = mean(losses)
    if dist.get_rank() == 0:
        print(summary)
        record = {
            "command": "torchrun --nproc-per-node 4 benchmarks/muon_rounds.py",
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            "steps": args.steps,
            "every": args.every,
            "losses": summary,
            "runs": runs,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
