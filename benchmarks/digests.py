"""What training and planning come to, bit for bit: held before and after a change.

    python benchmarks/digests.py record --out benchmarks/records/digests.json
    python benchmarks/digests.py check benchmarks/records/digests.json

Every recipe trains a small model among 2 and 3 ranks in one machine, with SGD and with
AdamW: plain; with accumulation and clipping; and, on top of that, with a checkpoint in
the middle from which new objects go on. Recorded are SHA-256 of all parameters, of the
optimizer's state and of `sync.state_dict()` on every rank; and what the planner
predicts for the cells of section 16 of the README, in seconds. Digests are those of one
machine and one version of torch: record them anew where `check` finds other ones.

`auto` is left out, which decides by time.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from predictions import HOSTS, RATES, SCHEMES, WORKLOADS
from predictions_lab import Cluster
from torch import Tensor, nn

import gradtide
from gradtide.core.payload import traits
from gradtide.fusion import BySize
from gradtide.kfac import DISTRIBUTIONS
from gradtide.lab.record import commit, machine, versions
from gradtide.planner import network as networks
from gradtide.planner import trace as traces
from gradtide.planner.virtual import simulate
from gradtide.scheme import RECIPES, Scheme, parse

SIZES = (2, 3)
STEPS = 8  # of the optimizer
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3),
}
# What is done to gradients, and whether a checkpoint is loaded half-way.
RUNS = {"plain": (1, None, False), "clip": (2, 0.5, False), "resume": (2, 0.5, True)}
WIRES = ("", "(wire='bf16')", "(wire='fp16')")
SCHEDULES = ("", "(schedule='dear')", "(schedule='local')")
SPARSE = tuple(
    name
    for name, scheme in RECIPES.items()
    if name != "auto" and not traits(scheme.collective).dense
    if not scheme.schedule.rounds
)
# Beside the recipes: what wraps them.
CALLS = (
    "topk(0.05, warmup=4)",
    "topka2a(0.05, warmup=4, momentum_correction=True)",
    "oktopk(0.05, schedule='dear', warmup=4, momentum_correction=True)",
    "exdyna(0.05, momentum_correction=True)",
    "exdyna(0.05, schedule='local', warmup=6)",
    "oktopk(0.05, schedule='local', warmup=6)",
    "oktopk(0.05, wire='fp16')",
    "acpsgd(warmup=4)",
)
THEN = {
    "PartitionedTopK": "Agreed",
    "CLTk": "Leader",
    "MomentumCorrection": "Corrected",
}
RECORDED = Path(__file__).parent / "records" / "predictions_202611"
NEAR = 0.005  # by how much a prediction may change

app = typer.Typer(no_args_is_help=True)


def schemes() -> dict[str, Scheme]:
    """What is trained, in small buckets, so that there are some."""
    texts = (
        *(f"{name}{call}" for name in ("sequential", "wfbp", "dear") for call in WIRES),
        *(f"{name}{call}" for name in SPARSE for call in SCHEDULES),
        *(f"{name}_kfac{call}" for name in DISTRIBUTIONS for call in SCHEDULES[:2]),
        *CALLS,
    )
    return {text: _cut(parse(text)) for text in texts}


def _cut(scheme: Scheme) -> Scheme:
    second = scheme.preconditioner
    if second is not None:
        second = replace(second, factor_every=2, inverse_every=4)
    fusion = BySize(0.1, ends=0.02, pieces=6)
    return replace(scheme, fusion=fusion, preconditioner=second)


def model() -> nn.Module:
    """Some small tensors and a large one; a parameter that is not used at times."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 460),
        nn.Tanh(),
        nn.Linear(460, 40),
        nn.LayerNorm(40),
        nn.Linear(40, 10),
    )


def trained(scheme: Scheme, optimizer: str, run: str) -> dict[str, str]:
    """Train on this rank; returns its digests."""
    passes, clip, resume = RUNS[run]
    net = model()
    steps = OPTIMIZERS[optimizer](net.parameters())
    sync = gradtide.replicate(net, steps, scheme)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        if resume and step == STEPS // 2:
            saved = io.BytesIO()
            states = [x.state_dict() for x in (net, steps, sync)]
            torch.save(states, saved)
            sync.remove()
            net = model()
            steps = OPTIMIZERS[optimizer](net.parameters())
            sync = gradtide.replicate(net, steps, scheme)
            saved.seek(0)
            states = torch.load(saved, weights_only=True)
            for x, state in zip((net, steps, sync), states, strict=True):
                x.load_state_dict(state)  # type: ignore[attr-defined]
        for last in (False,) * (passes - 1) + (True,):
            images = torch.randn(6, 1, 8, 8, generator=draw)
            labels = torch.randint(10, (6,), generator=draw)
            if last:
                F.cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
            else:
                with sync.no_sync():
                    F.cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            sync.clip_grad_norm_(clip)
        steps.step()
        steps.zero_grad()
    sync.flush()
    found = {
        "parameters": digest(list(net.parameters())),
        "optimizer": digest(steps.state_dict()),
        "sync": digest(sync.state_dict()),
    }
    sync.remove()
    return found


def digest(value: Any) -> str:
    """SHA-256 of numbers, texts and tensors, as far as they are nested."""
    sha = hashlib.sha256()
    for piece in _pieces(value):
        sha.update(piece)
    return sha.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    match value:
        case Tensor():
            yield f"{value.dtype} {tuple(value.shape)} ".encode()
            yield (
                value.detach()
                .contiguous()
                .flatten()
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        case Mapping():
            for key in sorted(value, key=repr):
                yield f"{key!r}: ".encode()
                yield from _pieces(value[key])
        case list() | tuple():
            for item in value:
                yield from _pieces(item)
            yield b"; "
        case bytes() if value.startswith(b"PK"):  # saved: its archive has a layout
            yield from _pieces(torch.load(io.BytesIO(value), weights_only=True))
        case _:
            yield f"{_then(repr(value))}, ".encode()


def _then(text: str) -> str:
    """The names of parts that states had when digests were recorded first.

    What LOCAL does for steps of Adam were constants then, and no fields.
    """
    text = text.replace(", ahead=0.25, against=0.1, noise=True", "")
    for name, old in THEN.items():
        text = text.replace(f"{name}(", f"{old}(")
    return text


def _rank(rank: int, size: int, folder: str, only: str, sending: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    store = f"file://{Path(folder, 'store')}"
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=limit
    )
    for name, scheme in schemes().items():
        if only in name:
            for optimizer, run in product(OPTIMIZERS, RUNS):
                key = f"{name} P={size} {optimizer} {run}"
                sending.send((key, trained(scheme, optimizer, run)))
    sending.send(None)
    dist.destroy_process_group()


def training(size: int, only: str) -> dict[str, dict[str, str]]:
    """The digests of all runs among `size` ranks; those of ranks are joined."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=_rank, args=(r, size, folder, only, pipe[1]))
            for r, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for _, sending in pipes:
            sending.close()
        try:
            while all(said := [receiving.recv() for receiving, _ in pipes]):
                one = [digests for _, digests in said]
                found[said[0][0]] = {kind: _joined(one, kind) for kind in one[0]}
        except EOFError:
            raise SystemExit("a rank ended before its last run: see above") from None
        finally:
            for process in ranks:
                process.terminate()
                process.join()
    return found


def _joined(ranks: list[dict[str, str]], kind: str) -> str:
    if kind == "parameters" and len({one[kind] for one in ranks}) > 1:
        raise SystemExit(f"ranks differ in their parameters: {ranks}")
    return digest([one[kind] for one in ranks])[:16]


def predictions() -> dict[str, float]:
    """Seconds of a step, for every cell of section 16."""
    found = {}
    for workload, hosts, rate in product(WORKLOADS, HOSTS, RATES):
        cluster = Cluster(RECORDED, workload, hosts, rate)
        trace, network = traces.load(cluster.trace), networks.load(cluster.network)
        for name in SCHEMES:
            step = simulate(trace, parse(name), network).step
            found[f"{cluster.short} {hosts} x {rate} {name}"] = step
    return found


def everything(only: str = "") -> dict[str, Any]:
    trained = {key: one for size in SIZES for key, one in training(size, only).items()}
    return {"training": trained, "predictions": {} if only else predictions()}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What is not as it was, one line each."""
    told = []
    old, new = before["training"], after["training"]
    for key in new:
        kinds = [
            kind for kind in new[key] if old.get(key, {}).get(kind) != new[key][kind]
        ]
        if kinds:
            told.append(f"{key}: other {', '.join(kinds)}")
    old, new = before["predictions"], after["predictions"]
    for key in new:
        was = old.get(key, 0.0)
        if abs(new[key] - was) > NEAR * was:
            told.append(f"{key}: {was:.4f} s predicted before, {new[key]:.4f} s now")
    return told


Only = Annotated[str, typer.Option(help="Schemes whose names contain this, alone.")]


@app.command()
def record(out: Annotated[Path, typer.Option(help="Write JSON there.")]) -> None:
    """Train and predict everything, and write it down."""
    about: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
    }
    about |= {"versions": versions(), "machine": machine()}
    out.write_text(json.dumps({**about, **everything()}, indent=1) + "\n", "utf-8")


@app.command()
def check(recorded: Path, only: Only = "") -> None:
    """Train and predict everything again; fails if anything has changed."""
    before, after = json.loads(recorded.read_text("utf-8")), everything(only)
    told = changes(before, after)
    print("\n".join(told))
    print(
        f"{len(told)} changes in {len(after['training'])} runs and "
        f"{len(after['predictions'])} predictions"
    )
    raise typer.Exit(bool(told))


if __name__ == "__main__":
    app()
