"""What of an exchange stays exposed when a model is compiled by blocks, or as a whole.

    gradtide lab run --hosts 2 --rate 200mbit -- \
        python benchmarks/compiled.py --out benchmarks/records/compiled_....json

Compute is a wait inside each block, in forward and backward, which torch.compile cannot
make any faster: what differs between the rows is when gradients leave and updates come.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gradtide
from gradtide.lab.record import origin

BLOCKS, WIDTH, SECONDS = 8, 512, 0.02  # of a block's forward; its backward takes twice
SCHEMES = {
    "wfbp": "Scheme(Dense(), BySize(1.0, 1.0, 1), WFBP)",
    "dear": "Scheme(Dense(), BySize(1.0, 1.0, 1), DEAR)",
}
WAYS = ("eager", "blocks", "whole")


@torch.library.custom_op("gradtide_benchmark::wait", mutates_args=())
def wait(x: Tensor, seconds: float) -> Tensor:
    """Compute that takes a given time."""
    time.sleep(seconds)
    return x.clone()


wait.register_fake(lambda x, seconds: torch.empty_like(x))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.seconds = inputs[1]


wait.register_autograd(
    lambda ctx, g: (wait(g, 2 * ctx.seconds), None), setup_context=_keep
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + wait(torch.tanh(self.inner(x)), SECONDS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def measure(scheme: str, way: str, backend: str, steps: int) -> dict[str, Any]:
    """Medians over steps of what stayed exposed, and of a step; seconds."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Model()
    if way == "whole":
        model.compile(backend=backend)
    for block in model.blocks if way == "blocks" else ():
        block.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sync = gradtide.replicate(model, optimizer, SCHEMES[scheme])
    exposed, times = [], []
    x = torch.randn(4, WIDTH)
    for step in range(steps + 4):
        begin = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 4:
            times.append(time.perf_counter() - begin)
            exposed.append(sync.metrics()["exposed_seconds"])
        elif step == 3:
            sync.metrics()
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs, "compiled anew"
    assert not counters["graph_break"]
    sync.remove()
    return {
        "scheme": scheme,
        "way": way,
        "exposed": median(exposed),
        "step": median(times),
        "graphs": graphs,
    }


def main() -> None:
    """Print a table, and write the record on rank 0."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--backend", default="inductor")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for _ in range(given.rounds):  # in turn, so that the machine's moods fall on all
        for scheme in SCHEMES:
            for way in WAYS:
                rows.append(measure(scheme, way, given.backend, given.steps))
                if dist.get_rank() == 0:
                    print(rows[-1], flush=True)
    table = {}
    for scheme in SCHEMES:
        own = [row for row in rows if row["scheme"] == scheme]
        best = {
            way: median(row["exposed"] for row in own if row["way"] == way)
            for way in WAYS
        }
        table[scheme] = {way: best[way] / best["eager"] for way in WAYS}
    if dist.get_rank() == 0:
        print("exposed, as a multiple of eager's:", json.dumps(table))
        if given.out:
            record = {
                **origin(sys.argv),
                "backend": given.backend,
                "rows": rows,
                "exposed": table,
            }
            given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
