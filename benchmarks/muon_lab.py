"""Muon in the lab: a step by owners under `dear`, beside other ways to step matrices.

    python benchmarks/muon_lab.py all --rounds 3 \
        --out benchmarks/records/muon_lab_202611.json

Four hosts train the lab's small language model. Muon has the matrices but for the
embedding, AdamW the rest. All contestants train in turns, some steps each, in one run.
The bar: `dear` by owners takes at most 0.8 of the step of `wfbp` by owners, and leads
to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

import gradtide
from gradtide.collectives._balance import longest_first
from gradtide.lab.cluster import Cluster
from gradtide.lab.internet import Internet, Link
from gradtide.lab.internet import Path as Way
from gradtide.lab.launch import launch
from gradtide.lab.rate import parse_rate
from gradtide.lab.record import origin
from gradtide.lab.workloads import build
from gradtide.optim import DistributedMuon, Several
from gradtide.optim.owners import cost

HOSTS = 4
# Who orthogonalises, and by what schedule; the first is what others are held against.
CONTESTANTS = (
    ("wfbp", "owners"),
    ("wfbp", "all"),
    ("dear", "all"),
    ("dear", "owners"),
    ("wfbp(wire='bf16')", "owners"),
    ("dear(wire='bf16')", "owners"),
)
BAR = 0.8
NS_STEPS = 5

app = typer.Typer(pretty_exceptions_enable=False)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Those that Muon is for."""
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
    left = {id(p) for m in embeddings for p in m.parameters()}
    return [p for p in model.parameters() if p.dim() == 2 and id(p) not in left]


def optimizer(model: nn.Module, who: str) -> Optimizer:
    two = matrices(model)
    known = {*map(id, two)}
    rest = AdamW([p for p in model.parameters() if id(p) not in known], 1e-3)
    kind = DistributedMuon if who == "owners" else Muon
    return Several(kind(two, 0.02), rest)


class Contestant:
    """One model in training."""

    def __init__(self, workload: str, scheme: str, who: str) -> None:
        self.work = build(workload, dist.get_rank(), dist.get_world_size())
        self.optimizer = optimizer(self.work.model, who)
        self.sync = gradtide.replicate(self.work.model, self.optimizer, scheme)
        self.steps = 0

    def step(self) -> float:
        """Seconds of a step, from one `optimizer.step()` to the next."""
        begin = time.monotonic()
        loss = self.work.loss(self.work.model, self.work.batch(self.steps))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return time.monotonic() - begin

    def digest(self) -> str:
        """Of all bits of the parameters."""
        self.sync.flush()
        every = [p.detach().flatten() for p in self.work.model.parameters()]
        return hashlib.sha256(torch.cat(every).numpy().tobytes()).hexdigest()[:16]


@app.command("rank")
def train(workload: str, rounds: int, steps: int) -> None:
    """Train all contestants in turns; tell of each turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    every = [Contestant(workload, *one) for one in CONTESTANTS]
    for turn in range(-1, rounds):  # the first one is not counted
        for i, own in enumerate(every):
            dist.barrier()
            seconds = [own.step() for _ in range(steps)]
            own.sync.flush()
            if turn >= 0 and dist.get_rank() == 0:
                print("turn", json.dumps([i, seconds[1:]]))
    if dist.get_rank() == 0:
        print("bits", json.dumps([own.digest() for own in every]))
    else:
        for own in every:
            own.digest()
    for own in every:
        own.sync.remove()
    dist.destroy_process_group()


def run(workload: str, rate: str, rounds: int, steps: int) -> dict[str, Any]:
    bits = parse_rate(rate) or 0.0
    internet = Internet.alike(HOSTS, Link(bits, bits, Way()), Way())
    cluster = Cluster.emulating(HOSTS, 1, bits, internet=internet)
    seconds: list[list[float]] = [[] for _ in CONTESTANTS]
    digests: list[str] = []

    def note(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("turn "):
            i, found = json.loads(line.removeprefix("turn "))
            seconds[i].extend(found)
        if rank == 0 and line.startswith("bits "):
            digests.extend(json.loads(line.removeprefix("bits ")))

    counts = str(rounds), str(steps)
    command = [sys.executable, __file__, "rank", workload, *counts]
    launch(cluster, command, on_line=note, timeout=900)
    first = median(seconds[0])
    return {
        "rate": rate,
        "rows": [
            {
                "scheme": scheme,
                "orthogonalises": who,
                "seconds": median(own),
                "of the first": median(own) / first,
                "bits": digest,
            }
            for (scheme, who), own, digest in zip(
                CONTESTANTS, seconds, digests, strict=True
            )
        ],
    }


def shares(workload: str) -> dict[str, float]:
    """Of all orthogonalisation what the rank with most does, times their number."""
    found = matrices(build(workload, 0, 1).model)
    costs = [cost(p.shape[0], p.shape[1], NS_STEPS) for p in found]
    most = {}
    for size in (2, 3, 4, 6, 8):
        owners = longest_first(costs, [1.0] * size)[1]
        loads = [0.0] * size
        for own, owner in zip(costs, owners, strict=True):
            loads[owner] += own
        most[str(size)] = max(loads) * size / sum(costs)
    return most


@app.command("all")
def main(
    out: Annotated[Path, typer.Option(help="Where the record is written.")],
    rates: Annotated[str, typer.Option(help="Of links, by commas.")] = "200mbit,50mbit",
    workload: str = "gpt",
    rounds: int = 4,
    steps: int = 6,
) -> None:
    """Run all contestants at all rates, and write the record."""
    record: dict[str, Any] = {**origin(sys.argv), "workload": workload, "runs": []}
    record["shares"] = {workload: shares(workload)}
    for rate in rates.split(","):
        found = run(workload, rate, rounds, steps)
        record["runs"].append(found)
        print(json.dumps(found, indent=1), flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app()
