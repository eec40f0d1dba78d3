"""Muon by owners: what each rank computes, waits for, keeps and sends.

    python benchmarks/muon.py --out benchmarks/records/muon_202611.json

Trains blocks of a transformer with 1, 2 and 4 ranks on this machine, joined by Gloo on
loopback, each with one thread: with AdamW alone; with torch's Muon for matrices, on
every rank; with torch's ZeroRedundancyOptimizer around Muon; and with DistributedMuon.
AdamW has what is no matrix. Orthogonalisation and the optimizer's step are seconds of
processor of the rank's own thread, so they mean the same where ranks are more than
cores; the wall-clock seconds of a step do not. Medians over steps, of the slowest rank.

The bar: orthogonalisation of the slowest rank with P ranks takes at most 1.2 / P of
what torch's Muon takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Muon, Optimizer

import gradtide
from gradtide.lab.record import commit, machine, versions
from gradtide.optim import DistributedMuon
from gradtide.optim import matrices as ours

SIZES = (1, 2, 4)
CONTESTANTS = ("AdamW", "Muon", "ZeroRedundancyOptimizer(Muon)", "DistributedMuon")
HEADS = 4
BAR = 1.2


class Block(nn.Module):
    """Attention and a perceptron, with norms before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.attention(self.first(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return found


def optimizers(contestant: str, model: nn.Module) -> list[Optimizer]:
    """What steps the matrices and what steps the rest, or one for all."""
    params = [*model.parameters()]
    matrices = [p for p in params if p.dim() == 2]
    rest = AdamW([p for p in params if p.dim() != 2])
    match contestant:
        case "AdamW":
            return [AdamW(params)]
        case "Muon":
            return [Muon(matrices), rest]
        case "DistributedMuon":
            return [DistributedMuon(matrices), rest]
    return [ZeroRedundancyOptimizer(matrices, optimizer_class=Muon), rest]


class Orthogonalisation:
    """Seconds of processor inside Newton-Schulz, by whoever calls it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inner: Callable[..., Tensor] = vars(ours)["orthogonalize"]
        vars(ours)["orthogonalize"] = self
        vars(sys.modules["torch.optim._muon"])["_zeropower_via_newtonschulz"] = self

    def __call__(self, *args: Any) -> Tensor:
        begin = time.thread_time()
        found = self._inner(*args)
        self.seconds += time.thread_time() - begin
        return found

    def take(self) -> float:
        """The seconds since this was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def kept(opts: list[Optimizer]) -> int:
    """Bytes of the optimizers' state on this rank."""
    inner = [getattr(opt, "optim", opt) for opt in opts]
    states = [state for opt in inner for state in opt.state.values()]
    return sum(t.nbytes for s in states for t in s.values() if isinstance(t, Tensor))


def trained(
    contestant: str, newton: Orthogonalisation, args: argparse.Namespace
) -> dict[str, float]:
    """What one contestant costs on this rank, in medians over steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
    opts, rank = optimizers(contestant, model), dist.get_rank()
    sync = gradtide.replicate(model, None, "wfbp")
    sent = [0.0]
    rows: list[dict[str, float]] = []
    for step in range(args.warmup + args.steps):
        torch.manual_seed(1000 * step + rank)
        x = torch.randn(args.batch, args.length, args.width)
        dist.barrier()
        begin = time.perf_counter()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizing, thread = time.perf_counter(), time.thread_time()
        for opt in opts:
            opt.step()
        row = {
            "optimizer_cpu_seconds": time.thread_time() - thread,
            "optimizer_seconds": time.perf_counter() - optimizing,
            "step_seconds": time.perf_counter() - begin,
            "orthogonalisation_cpu_seconds": newton.take(),
        }
        model.zero_grad()
        rows.append(row)
    for opt in opts:
        if isinstance(opt, DistributedMuon):
            whole = opt._engine.transport.payload_bytes
            sent.append(whole / (args.warmup + args.steps))
    sync.remove()
    timed = rows[args.warmup :]
    found = {name: median(row[name] for row in timed) for name in timed[0]}
    return {**found, "state_bytes": kept(opts), "gathered_bytes": max(sent)}


def rank_of(rank: int, size: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = f"file://{Path(folder, 'store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    newton = Orthogonalisation()
    for contestant in CONTESTANTS:
        every: list[Any] = [None] * size
        dist.all_gather_object(every, trained(contestant, newton, args))
        if rank == 0:
            found = {name: max(row[name] for row in every) for name in every[0]}
            with Path(folder, "rows").open("a") as file:
                words = {"ranks": size, "optimizer": contestant, **found}
                file.write(json.dumps(words) + "\n")
    dist.destroy_process_group()


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                mp.get_context("spawn").Process(
                    target=rank_of, args=(rank, size, folder, args)
                )
                for rank in range(size)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                raise SystemExit("a rank has failed")
            for line in Path(folder, "rows").read_text().splitlines():
                yield json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for row in measured(args):
        rows.append(row)
        print(
            f"P={row['ranks']} {row['optimizer']:30}"
            f" orthogonalisation {1e3 * row['orthogonalisation_cpu_seconds']:8.1f} ms"
            f"  optimizer {1e3 * row['optimizer_cpu_seconds']:8.1f} ms of processor,"
            f" {1e3 * row['optimizer_seconds']:8.1f} ms"
            f"  step {1e3 * row['step_seconds']:8.1f} ms"
            f"  state {row['state_bytes'] / 1e6:6.2f} MB"
            f"  gathered {row['gathered_bytes'] / 1e6:6.2f} MB",
            flush=True,
        )
    seconds = {
        (row["ranks"], row["optimizer"]): row["orthogonalisation_cpu_seconds"]
        for row in rows
    }
    shares = {
        size: seconds[size, "DistributedMuon"] / seconds[size, "Muon"] for size in SIZES
    }
    for size, share in shares.items():
        met = "met" if share <= BAR / size else "MISSED"
        print(f"P={size}: {share:.3f} of Muon's orthogonalisation ({met})")
    if args.out is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            "share_of_orthogonalisation": shares,
            "rows": rows,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
