"""Models that are sharded inside hosts, against one process: run on every rank.

    torchrun --nproc-per-node 4 benchmarks/sharded.py --hosts 2 \
        --out benchmarks/records/sharded_2x2.json

Each host's ranks have parts of a model, by FSDP2, by tensor parallelism, or, with 4
ranks a host, by both; gradtide averages between hosts. It reports

- how far parameters and norms are from those of one process with the whole batch, after
  steps of AdamW with clipping in float64, relative to the largest of each tensor; and
  whether any two ranks have other norms;
- the held-out loss of the workload `digits` under FSDP2, by scheme;
- whether a checkpoint (torch.distributed.checkpoint) that is read is what was written,
  bit for bit: into the same mesh, and into hosts of one rank, where the residuals of
  the parts have to be those of the whole.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import gradtide
from gradtide.lab.record import machine, versions
from gradtide.lab.workloads import build

BATCH = 24  # samples a step, over all ranks
MAX_NORM = 0.3  # most steps are clipped
LEARNT = (
    "wfbp",
    "oktopk(0.1, warmup=160)",
    "exdyna(0.1, schedule='local', warmup=160)",
)
SPARSE = "exdyna(0.1)"


class Block(nn.Module):
    """A residual block whose two linear layers tensor parallelism can divide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 4), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


def network() -> nn.Sequential:
    """The same on every rank; its parameters do not divide evenly."""
    torch.manual_seed(3)
    layers = nn.Linear(5, 6), Block(6), Block(6), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def batch(step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """One part of a step's samples."""
    rng = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 5, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (BATCH,), generator=rng)
    return x.chunk(parts)[part], y.chunk(parts)[part]


def divide(model: nn.Sequential, kind: str, mesh: DeviceMesh) -> None:
    """Have the ranks of a host each keep a part; `kind` is fsdp, tp or fsdp+tp."""
    names = mesh.mesh_dim_names or ()
    if "tp" in kind:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in list(model)[1:3]:
            parallelize_module(block, mesh["tp"] if "tp" in names else mesh, plan)
    if "fsdp" in kind:
        shards = mesh["fsdp"] if "fsdp" in names else mesh
        for module in (*list(model)[1:3], model):
            fully_shard(module, mesh=shards)


def meshes(kind: str, hosts: int) -> tuple[DeviceMesh, DeviceMesh, int, int]:
    """Between hosts, inside; which part of a batch is this rank's, and of how many."""
    each = dist.get_world_size() // hosts
    shape: tuple[int, ...] = (hosts, each)
    names: tuple[str, ...] = ("outer", kind)
    if kind == "fsdp+tp":
        shape, names = (hosts, each // 2, 2), ("outer", "fsdp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    host = mesh.get_local_rank("outer")
    samples = 1 if kind == "tp" else shape[1]
    own = 0 if kind == "tp" else mesh.get_local_rank("fsdp")
    return mesh["outer"], mesh[names[1:]], host * samples + own, hosts * samples


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, put together."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def alone(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """One process with the whole batch: its parameters, and the norms of gradients."""
    model, norms = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        x, y = batch(step, 0, 1)
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return whole(model), norms


def distance(kind: str, hosts: int, scheme: str, steps: int) -> dict[str, float]:
    """How far a sharded run is from one process; a collective call."""
    outer, inner, part, parts = meshes(kind, hosts)
    model, norms = network(), []
    divide(model, kind, inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, optimizer, scheme, process_group=outer)
    for step in range(steps):
        x, y = batch(step, part, parts)
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        norms.append(float(sync.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    sync.remove()
    expected, their_norms = alone(steps)
    ours = whole(model)
    off = [(ours[name] - p).abs().max() / p.abs().max() for name, p in expected.items()]
    pairs = zip(norms, their_norms, strict=True)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, norms)
    return {
        "norms_between_ranks": float(any(others != norms for others in everyone)),
        "parameters": _worst(float(max(off))),
        "norms": _worst(max(abs(a - b) / b for a, b in pairs)),
    }


def learnt(hosts: int, scheme: str, steps: int, whole: bool) -> dict[str, float]:
    """The held-out loss of `digits` under FSDP2; a collective call.

    With the `whole` model, each rank of a host does what the host does together.
    """
    outer, inner, part, parts = meshes("fsdp", hosts)
    each = parts // hosts
    if whole:
        work = build("digits", rank=part // each, size=hosts, batch_size=32 * each)
    else:
        work = build("digits", rank=part, size=parts, batch_size=32)
        assert isinstance(work.model, nn.Sequential)
        for module in (work.model[3], work.model[8], work.model):
            fully_shard(module, mesh=inner)
    assert work.evaluate is not None
    optimizer = torch.optim.SGD(work.model.parameters(), lr=0.05, momentum=0.9)
    sync = gradtide.replicate(work.model, optimizer, scheme, process_group=outer)
    for step in range(steps):
        work.loss(work.model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    sent = sync.metrics()["sent_bytes"]
    sync.remove()
    return {**work.evaluate(work.model), "sent_bytes": sent}


def round_trip(hosts: int, steps: int = 3) -> dict[str, bool]:
    """Whether what is read is what was written; a collective call."""
    outer, inner, part, parts = meshes("fsdp", hosts)
    folder = _common(tempfile.mkdtemp())

    def run(outer: DeviceMesh, inner: DeviceMesh) -> Run:
        model = network()
        divide(model, "fsdp", inner)
        return Run(model, outer)

    first = run(outer, inner)
    first.train(range(steps), part, parts)
    saved = first.state()
    state_dict_saver.save(saved, checkpoint_id=folder)
    again = run(outer, inner)
    again.load(folder)
    same = _equal(again.state(), saved)
    for one in (first, again):
        one.train(range(steps, 2 * steps), part, parts)
        one.sync.remove()
    goes_on = _equal(whole(again.model), whole(first.model))

    # Into hosts of one rank each, on the first of these: the parts become one.
    each, rank = dist.get_world_size() // hosts, dist.get_rank()
    firsts = [[host] for host in range(hosts)]
    group = dist.new_group(range(hosts))
    small = DeviceMesh("cpu", firsts, mesh_dim_names=("outer", "fsdp"))
    residuals = {
        f"rank{rank // each}.{name}": residual.full_tensor()
        for name, residual in saved["sync"][f"rank{rank // each}"]["remainders"].items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, residuals)
    kept = True
    if rank < hosts:
        fewer = run(small["outer"], small["fsdp"])
        fewer.load(folder, group, each)
        own = fewer.sync.state_dict()[f"rank{rank}"]["remainders"]
        kept = all(
            torch.equal(r.full_tensor(), everyone[rank * each][f"rank{rank}.{name}"])
            for name, r in own.items()
        ) and any(bool(r.full_tensor().any()) for r in own.values())
        fewer.train(range(steps, 2 * steps), rank, hosts)
        fewer.sync.remove()
    found = {"bit_equal": same, "goes_on_bit_equal": goes_on, "one_rank_a_host": kept}
    return {name: not _worst(float(not true)) for name, true in found.items()}


class Run:
    """A sharded model that trains by a sparse scheme, with its checkpoints."""

    def __init__(self, model: nn.Module, outer: DeviceMesh) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.sync = gradtide.replicate(
            model, self.optimizer, SPARSE, process_group=outer
        )

    def train(self, steps: Sequence[int], part: int, parts: int) -> None:
        """Train for some steps."""
        for step in steps:
            x, y = batch(step, part, parts)
            F.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self, **read: int) -> dict[str, Any]:
        """What a checkpoint holds."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        sync = self.sync.state_dict(**read)
        return {"model": model, "optimizer": optimizer, "sync": sync}

    def load(self, folder: str, group: Any = None, shards: int | None = None) -> None:
        """Go on from a checkpoint; its hosts may have had another number of ranks."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state(**({} if shards is None else {"shards": shards}))
        state_dict_loader.load(state, checkpoint_id=folder, process_group=group)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.sync.load_state_dict(state["sync"])


def _equal(x: Any, y: Any) -> bool:
    """Whether nested dictionaries hold the same bits."""
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_equal(x[key], y[key]) for key in x)
    if isinstance(x, DTensor):
        return torch.equal(x.to_local(), y.to_local())
    return torch.equal(x, y) if isinstance(x, Tensor) else bool(x == y)


def _common(text: str) -> str:
    """Rank 0's."""
    found = [text]
    dist.broadcast_object_list(found)
    return found[0]


def _worst(own: float) -> float:
    """The largest of all ranks'."""
    number = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--digits", type=int, default=150, help="steps of the workload")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size = dist.get_world_size()
    each = size // args.hosts
    kinds = {2: ["fsdp", "tp"], 4: ["fsdp", "fsdp+tp"]}.get(each, ["fsdp"])
    record = {
        "command": f"torchrun --nproc-per-node {size} benchmarks/sharded.py --hosts "
        f"{args.hosts} --steps {args.steps} --digits {args.digits}",
        "versions": versions(),
        "machine": machine(),
        "hosts": args.hosts,
        "ranks_a_host": each,
        "distance": {k: distance(k, args.hosts, "wfbp", args.steps) for k in kinds},
        "digits": {
            name: {s: learnt(args.hosts, s, args.digits, whole) for s in LEARNT}
            for name, whole in (("sharded", False), ("whole", True))
        },
        "checkpoint": round_trip(args.hosts),
    }
    if dist.get_rank() == 0:
        print(json.dumps(record, indent=2))
        if args.out:
            args.out.write_text(json.dumps(record, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
