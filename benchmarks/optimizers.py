"""Optimizers x schemes: bits of DDP, refused by name, or learning. Run on every rank.

    torchrun --nproc-per-node 2 benchmarks/optimizers.py \
        --out benchmarks/records/optimizers_202611.json

Trains a small network for 50 steps under DDP, `wfbp`, `dear` with a bucket for every
parameter, and `exdyna(0.1, schedule='local')`, with every optimizer of torch and of
other libraries that are installed, and with a scheduler. An outcome is the reason of a
refusal, or
whether the ranks' parameters are equal bit for bit, how far they are from those of DDP,
and the mean loss of the last 5 steps over that of the first 5. Optimizers that need a
closure are left to the tests.
"""

from __future__ import annotations

import argparse
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradtide
from gradtide.lab.record import commit, machine, versions

SCHEMES = (
    "wfbp",
    "Scheme(Dense(), fusion=PerTensor(), schedule=DEAR)",
    "exdyna(0.1, schedule='local')",
)
PACKAGES = ("lion-pytorch", "schedulefree", "bitsandbytes", "pytorch-optimizer")
# Of other libraries, by module and class, with a learning rate.
LIBRARIES = {
    "lion_pytorch": {"Lion": 1e-3},
    "schedulefree": {"AdamWScheduleFree": 0.01, "SGDScheduleFree": 0.1},
    "bitsandbytes.optim": {"Adam8bit": 3e-3, "AdamW8bit": 3e-3, "Lion8bit": 1e-3},
    "pytorch_optimizer": {
        "Lamb": 0.01,
        "LARS": 0.1,
        "SOAP": 3e-3,
        "ScalableShampoo": 0.01,
        "Prodigy": 1.0,
        "DAdaptAdam": 1.0,
        "Ranger": 0.01,
        "AdEMAMix": 3e-3,
        "AdaFactor": 0.01,
        "Adan": 3e-3,
        "SM3": 0.1,
    },
}


def optimizers() -> Iterator[tuple[str, Callable[[Any], Optimizer]]]:
    """Each with its name and what makes it of parameters."""
    for name, kind in sorted(vars(optim).items()):
        ours = name not in ("Optimizer", "SparseAdam", "LBFGS")
        if ours and inspect.isclass(kind) and issubclass(kind, Optimizer):
            yield name, kind
    yield "SGD momentum", lambda p: optim.SGD(p, 0.05, momentum=0.9)
    yield "SGD nesterov", lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True)
    yield "AdamW amsgrad", lambda p: optim.AdamW(p, amsgrad=True)
    yield "AdamW fused", lambda p: optim.AdamW(p, fused=True)
    for module, kinds in LIBRARIES.items():
        try:
            found = import_module(module)
        except ImportError as error:
            print(f"left out: {module} ({error})")
            continue
        for name, lr in kinds.items():
            yield f"{module}.{name}", _maker(getattr(found, name), lr)


def _maker(kind: Callable[..., Optimizer], lr: float) -> Callable[[Any], Optimizer]:
    return lambda params: kind(params, lr=lr)


def train(
    make: Callable[[Any], Optimizer], scheme: str, steps: int, bias: bool
) -> tuple[Tensor, float]:
    """All parameters, and the last losses over the first ones."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(16, 320, bias), nn.Tanh(), nn.Linear(320, 16, bias)
    )
    optimizer, rank = make(model.parameters()), dist.get_rank()
    outer, sync = model, None
    if scheme == "ddp":
        outer = DistributedDataParallel(model)
    else:
        sync = gradtide.replicate(model, optimizer, scheme)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i / 50))
    getattr(optimizer, "train", lambda: None)()
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = (outer(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    if sync is not None:
        sync.remove()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat, sum(losses[-5:]) / sum(losses[:5])


def outcome(
    make: Callable[[Any], Optimizer], scheme: str, steps: int, bias: bool, ddp: Tensor
) -> dict[str, Any]:
    """What becomes of an optimizer under a scheme, the same on every rank."""
    try:
        flat, learned = train(make, scheme, steps, bias)
    except ValueError as error:
        return {"refused": str(error)}
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return {
        "ranks_equal": all(torch.equal(flat, other) for other in every),
        "equal_to_ddp": torch.equal(flat, ddp),
        "relative_to_ddp": ((flat - ddp).norm() / ddp.norm()).item(),
        "last_losses_over_first": round(learned, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of optimizers that are not ours
    dist.init_process_group("gloo")
    record = {
        "command": f"torchrun --nproc-per-node {dist.get_world_size()} "
        f"benchmarks/optimizers.py --steps {args.steps}",
        "commit": commit(),
        "versions": versions(*PACKAGES),
        "machine": machine(),
        "ranks": dist.get_world_size(),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, make in optimizers():
        bias = name != "Muon"  # it takes matrices alone
        ddp, learned = train(make, "ddp", args.steps, bias)
        found[name] = {"ddp": {"last_losses_over_first": round(learned, 4)}}
        for scheme in SCHEMES:
            found[name][scheme] = outcome(make, scheme, args.steps, bias, ddp)
        if dist.get_rank() == 0:
            print(f"{name:36}", *(_cell(found[name][s]) for s in SCHEMES), flush=True)
    if dist.get_rank() == 0 and args.out:
        text = json.dumps({**record, "optimizers": found}, indent=2)
        args.out.write_text(text + "\n")
    dist.destroy_process_group()


def _cell(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"{'refused':>18}"
    if not found["ranks_equal"]:
        return f"{'RANKS DIFFER':>18}"
    near = "=" if found["equal_to_ddp"] else f"{found['relative_to_ddp']:.0e}"
    return f"{near:>9} {found['last_losses_over_first']:8.3f}"


if __name__ == "__main__":
    main()
