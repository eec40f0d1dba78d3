"""What hooks cost in time, memory and waits, where there is nobody to exchange with.

GPT-2 of 124 M parameters, bf16 by autocast, a fused AdamW, one rank of NCCL. The others
are held against the better of two runs of DDP, with bucket views and a static graph.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu.model import ALONE, GPT2, TINY, Entrant, adamw, transformer
from gpu.results import Bar, Book
from gpu.setting import Setting

c10d: Any = dist  # whose stores are not exported for mypy

DDP, BF16 = "ddp", "ddp(wire='bf16')"
AGAIN = ", once more"
DENSE = {"wfbp": DDP, "dear": DDP, "wfbp(wire='bf16')": BF16, "dear(wire='bf16')": BF16}
SPARSE = "exdyna(0.01, schedule='local')"
# Of DDP's, at its best of two.
BARS = tuple(
    bar
    for name, base in {**DENSE, SPARSE: DDP}.items()
    for per in [(base, base + AGAIN)]
    for bar in (
        Bar(f"{name}: a step, of DDP's", name, "ms", 1.02, per=per),
        Bar(f"{name}: memory, of DDP's", name, "memory", 1.01, per=per),
        Bar(f"{name}: waits for the device", name, "waits", 0),
    )
    if name != SPARSE or bar.key == "memory"
)


def measure(book: Book, setting: Setting) -> None:
    names = [DDP, *list(DENSE)[:2], SPARSE, BF16, *list(DENSE)[2:], ALONE]
    names += [DDP + AGAIN, BF16 + AGAIN]
    if setting.tiny:
        names = names[:4]
    with alone(setting):
        book.measure({name: partial(trained, setting, name) for name in names})


@contextmanager
def alone(setting: Setting) -> Iterator[None]:
    """A group of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if setting.cuda else "gloo",
            store=c10d.FileStore(str(Path(folder, "store")), 1),
            rank=0,
            world_size=1,
        )
        yield


def trained(setting: Setting, name: str) -> dict[str, Any]:
    """A step's milliseconds, also of the host alone; its waits, and peak memory.

    A sparse exchange's residual, which it cannot be without, is left out of the latter.
    """
    name = name.removesuffix(AGAIN)
    shape, batch = (TINY, 2) if setting.tiny else (GPT2, 8)
    setting.begin_peak()
    tokens = torch.randint(
        shape.vocabulary, (batch, shape.length + 1), device=setting.device
    )
    model = transformer(setting, shape)
    entrant = Entrant(name, model, adamw(setting, model))
    repeat, warm = (3, 2) if setting.tiny else (20, 5)
    step = partial(entrant.step, tokens)
    found: dict[str, Any] = {"ms": setting.mean_milliseconds(step, repeat, warm)}
    found["host ms"] = setting.host_milliseconds(step)
    if setting.cuda:
        found["waits"] = setting.waits(step)
        residual = 4 * sum(p.numel() for p in model.parameters())
        found["memory"] = setting.peak() - (residual if name == SPARSE else 0)
    entrant.leave()
    return found
