"""Schedules against each other and against DDP: run on every rank.

    gradtide lab run --hosts 3 --rate none -- \
        python benchmarks/equality.py --out benchmarks/records/equality_p3.json

Trains the `gpt` workload with AdamW, clipping and its schedule from the same seed under
sequential, wfbp and dear, and under DDP. Reports whether the first three are equal bit
for bit, and how far each is from DDP: the 2-norm of the difference of all parameters
over the 2-norm of all parameters.

In float32 that distance says little: Adam divides by gradients that are nearly zero, so
one rounding grows. The control shows by how much: DDP against DDP whose clipping adds
up the norm in float64 and changes nothing else. `--double` trains in float64, where it
shows whether the mathematics is the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradtide
from gradtide.lab.record import machine, versions
from gradtide.lab.workloads import build

SCHEMES = ("sequential", "wfbp", "dear")
CONTROL = "ddp, norm added up in float64"


def train(scheme: str, steps: int, double: bool) -> Tensor:
    """All parameters after `steps` steps, as one flat tensor of float64."""
    work = build("gpt", rank=dist.get_rank(), size=dist.get_world_size())
    model, optimizer = work.model, work.optimizer
    if double:
        model.double()
    assert work.max_norm is not None
    assert work.scheduler is not None
    scheduler = work.scheduler(optimizer)
    sync = None
    if scheme not in SCHEMES:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        sync = gradtide.replicate(model, optimizer, scheme)
    for step in range(steps):
        loss = work.loss(wrapped if sync is None else model, work.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        if sync is not None:
            sync.clip_grad_norm_(work.max_norm)
        elif scheme == CONTROL:
            grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            torch.nn.utils.clip_grads_with_norm_(
                model.parameters(), work.max_norm, norm.float()
            )
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if sync is not None:
        sync.remove()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--double", action="store_true", help="train in float64")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trained = {
        scheme: train(scheme, args.steps, args.double)
        for scheme in (*SCHEMES, "ddp", CONTROL)
    }
    first, ddp = trained[SCHEMES[0]], trained["ddp"]
    flag = "--double " if args.double else ""
    record = {
        "command": f"gradtide lab run --hosts {dist.get_world_size()} --rate none -- "
        f"python benchmarks/equality.py {flag}--steps {args.steps}",
        "versions": versions(),
        "machine": machine(),
        "ranks": dist.get_world_size(),
        "bit_equal": all(torch.equal(first, trained[s]) for s in SCHEMES),
        "relative_to_ddp": {
            s: ((trained[s] - ddp).norm() / ddp.norm()).item()
            for s in (*SCHEMES, CONTROL)
        },
    }
    if dist.get_rank() == 0:
        print(json.dumps(record, indent=2))
        if args.out:
            args.out.write_text(json.dumps(record, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
