"""A training to a loss over a slow link: who is where DDP in bf16 ends, and when.

Everybody trains the same transformer on the bytes of Python's own library, with the
same rate. A baseline does so for a given time, in which that of evaluations does not
count; its last held-out loss is the target, and there the others end. The model is the
largest of which a baseline makes enough steps in that time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.model import BYTES, TINY, Entrant, Shape, adamw, loss_of, transformer
from gpu.ranks import Groups, joined, told_each
from gpu.ranks import measure as measure_on_ranks
from gpu.results import Bar, Book
from gpu.setting import Setting
from gradtide.lab.cluster import Cluster
from gradtide.lab.workloads.gpt import corpus
from gradtide.lab.workloads.workload import evaluating

RATE = 1e9
BASELINES = ("nccl ddp(wire='bf16')", "gloo ddp(wire='bf16')")
RECOMMENDED = (
    "gloo topka2a(0.02, schedule='local', warmup=60, wire='e3m0')",
    "gloo exdyna(0.01, schedule='local', warmup=60, wire='e3m0')",
)
NAMES = (
    BASELINES[0],
    *RECOMMENDED,
    "gloo wfbp(wire='e3m0')",
    BASELINES[1],
    "gloo dear(wire='bf16')",
    "gloo sparseloco(every=20)",
)
BASELINES_PART = 0.5  # of a section's time; the others are to need a third of that
SHAPES = (Shape(768, 12, 18, 256, 256), Shape(768, 12, 6, 256, 256), BYTES)  # 128 M ...
STEPS = 30  # a baseline makes so many, if that can be
START = 25.0  # seconds until ranks train
EVERY = 10  # steps between two looks at the loss
BARS = tuple(
    Bar(
        f"{name.partition(' ')[2]}: time to DDP's loss, of DDP's",
        name,
        "seconds to target",
        1 / 3,
        per=BASELINES,
    )
    for name in RECOMMENDED
)


def measure(book: Book, setting: Setting) -> None:
    names: Sequence[str] = NAMES
    if not setting.cuda:  # where the baseline is another
        names = [BASELINES[1], RECOMMENDED[0]]
    budget, target = BASELINES_PART * (setting.seconds - START), None
    if setting.tiny:
        budget = 2.0
    shape = TINY if setting.tiny else largest(budget)
    found = book.values
    if before := next((found[name] for name in BASELINES if name in found), None):
        # Who comes later does what those did who are there.
        budget, target = before["budget"], before["loss"]
        shapes = (*SHAPES, TINY)
        shape = next(s for s in shapes if s.parameters == before["parameters"])
    cluster = Cluster(4 if setting.cuda else 2, rate=RATE)
    measure_on_ranks(book, cluster, train, names, setting, shape, budget, target)


def largest(budget: float) -> Shape:
    """Of which an exchange in bf16 takes a small enough part of the time."""
    for shape in SHAPES:
        if STEPS * 1.5 * 16 * shape.parameters / RATE <= budget:
            return shape
    return SHAPES[-1]


# - On every rank ----------------------------------------------------------------------


def train(
    names: Sequence[str],
    setting: Setting,
    shape: Shape,
    budget: float,
    target: float | None,
) -> None:
    text, held_out = corpus(200_000 if setting.tiny else 16_000_000)
    data = text.to(setting.device), batches(held_out, shape.length, setting)
    with joined(setting, 60) as groups:

        def call(name: str) -> dict[str, Any]:
            nonlocal target
            found = trained(setting, groups, shape, budget, target, name, *data)
            if target is None and name in BASELINES:
                target = found["loss"]
            return found

        told_each(groups, names, call, 2 * budget + 40)


def batches(text: Tensor, block: int, setting: Setting) -> Tensor:
    """Rows of the held-out text, at equal distances: (batches, rows, block + 1)."""
    rows = text[: len(text) // (block + 1) * (block + 1)].view(-1, block + 1)
    count = min(len(rows) // 8 * 8, 16 if setting.tiny else 64)
    chosen = rows[:: len(rows) // count][:count]
    return chosen.long().view(-1, 8, block + 1).to(setting.device)


def trained(
    setting: Setting,
    groups: Groups,
    shape: Shape,
    budget: float,
    target: float | None,
    name: str,
    text: Tensor,
    held_out: Tensor,
) -> dict[str, Any]:
    """The curve of held-out losses over seconds, and when it is at the target.

    With no target it is a baseline's own end. None: not within the time.
    """
    transport, _, scheme = name.partition(" ")
    model = transformer(setting, shape)
    optimizer = adamw(setting, model)
    entrant = Entrant(scheme, model, optimizer, groups.of(transport))
    rng = torch.Generator(setting.device).manual_seed(100 + groups.rank)
    offsets = torch.arange(shape.length + 1, device=setting.device)
    curve, passed, steps, there = list[tuple[float, float]](), 0.0, 0, False
    while passed < budget and not there:
        setting.synchronize()
        dist.barrier(groups.gloo)
        start = time.perf_counter()
        for _ in range(EVERY):
            starts = torch.randint(
                len(text) - shape.length, (8, 1), generator=rng, device=setting.device
            )
            entrant.step(text[starts + offsets].long())
        entrant.flush()
        setting.synchronize()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=groups.gloo)
        passed, steps = passed + float(took), steps + EVERY
        loss = evaluated(groups, entrant, held_out)
        curve.append((round(passed, 3), loss))
        there = target is not None and loss <= target
    entrant.leave()
    return {
        "seconds to target": passed if there or target is None else None,
        "loss": loss,
        "steps": steps,
        "parameters": shape.parameters,
        "budget": budget,
        "curve": curve[:: max(1, len(curve) // 50)],
    }


def evaluated(groups: Groups, entrant: Entrant, held_out: Tensor) -> float:
    """The mean over the ranks, each of which has what all agreed on last."""
    with entrant.agreed(), evaluating(entrant.model):
        losses = [loss_of(entrant.model, tokens) for tokens in held_out]
    mean = torch.stack(losses).mean().cpu()
    dist.all_reduce(mean, group=groups.gloo)
    return round(float(mean) / groups.size, 4)
