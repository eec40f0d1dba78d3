"""Steps that vary among ranks: what they cost, against what a plan says.

    python benchmarks/stragglers.py all --out benchmarks/records/stragglers_202611.json

Four ranks on one machine wait for 60 ms in every forward, or for so long on average: a
normal number with a deviation of 0, 10 and 30 %, other ones on every rank. Counted is
by how much longer a step takes than without deviation, where ranks wait for each other
after every step (`wfbp`, and `topka2a` of steps) and in rounds of ten. Beside it stands
what `Network.slowest` says.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import gradtide
from gradtide.lab.record import origin
from gradtide.planner.network import Network
from gradtide.scheme import parse

RANKS, WAIT, STEPS, ROUNDS = 4, 0.06, 200, 3
SCHEMES = ("wfbp", "topka2a(0.1, schedule='local')", "diloco(every=10)")
SHARES = (0.0, 0.1, 0.3)

app = typer.Typer(pretty_exceptions_enable=False)


def build() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """A small model, which takes no time beside the wait."""
    model = nn.Linear(200, 50)
    example = torch.ones(1, 200)
    return (
        model,
        torch.optim.SGD(model.parameters(), 1e-6),
        lambda: model(example).sum(),
    )


@app.command("rank")
def train(scheme: str, share: float, seed: int) -> None:
    """Train, and tell what a step took on average."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer, loss = build()
    sync = gradtide.replicate(model, optimizer, scheme)
    rng = random.Random(1000 * seed + dist.get_rank())
    begin = 0.0
    for step in range(STEPS + 20):
        if step == 20:
            begin = time.monotonic()
        time.sleep(max(rng.gauss(WAIT, share * WAIT), 0.0))
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("seconds", (time.monotonic() - begin) / STEPS)
    sync.remove()
    dist.destroy_process_group()


def run(scheme: str, share: float, seed: int) -> float:
    """Seconds of a step."""
    command = ["torchrun", "--nproc-per-node", str(RANKS), __file__, "rank"]
    done = subprocess.run(
        [*command, scheme, str(share), str(seed)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("seconds "))
    return float(line.split()[1])


@app.command("all")
def main(
    out: Annotated[Path, typer.Option(help="Where the record is written.")],
) -> None:
    """Run all, one after the other, and write the record."""
    record: dict[str, Any] = {**origin(sys.argv), "rows": []}
    for scheme in SCHEMES:
        taken = {
            share: [run(scheme, share, i) for i in range(ROUNDS)] for share in SHARES
        }
        still = median(taken[0.0])
        for share in SHARES[1:]:
            there = replace(Network.ideal(RANKS, 1, 1e10), stragglers=share)
            factor = there.slowest(parse(scheme).schedule.every)
            told = 1 + (factor - 1) * WAIT / still
            row = {
                "scheme": scheme,
                "share": share,
                "step": median(taken[share]),
                "measured": median(taken[share]) / still,
                "predicted": told,
            }
            record["rows"].append(row)
            print(json.dumps(row), flush=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app()
