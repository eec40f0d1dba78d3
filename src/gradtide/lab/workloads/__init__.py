"""What the lab trains: models with data, optimizer and schedule, by name."""

from __future__ import annotations

from pathlib import Path

from . import digits, gpt, replay, synthetic
from .workload import Batch, Workload

__all__ = ["WORKLOADS", "Batch", "Workload", "build"]

WORKLOADS: tuple[tuple[str, str], ...] = (
    ("gpt", "byte-level transformer on Python's own sources, 2.8 M parameters"),
    ("digits", "convolutions with batch norm on scikit-learn's digits"),
    ("mlp", "1024-1024-1024-1024-10 on synthetic classes, 3.2 M parameters"),
    ("tiny600", "600 tensors of at most 1024 elements: what a tensor costs"),
    ("replay:resnet50", "waits and 25.6 M parameters in 161 tensors"),
    ("replay:bert-base", "waits and 109 M parameters in 199 tensors"),
    ("replay:bert-large", "waits and 335 M parameters in 391 tensors"),
    ("replay:gpt2", "waits and 124 M parameters in 148 tensors, tied head"),
)


def build(
    name: str,
    *,
    rank: int,
    size: int,
    seed: int = 0,
    step_ms: float | None = None,
    trace: Path | None = None,
    batch_size: int | None = None,
) -> Workload:
    """The named workload as this rank sees it.

    `batch_size` counts samples a rank and is for computed workloads; `step_ms`
    (milliseconds of forward and backward) and `trace` are for replayed ones.
    """
    names = [known for known, _ in WORKLOADS]
    if name not in names:
        raise ValueError(f"no workload {name!r}: choose one of {', '.join(names)}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}: ranks count from 0 to size - 1")
    if name.startswith("replay:"):
        if batch_size is not None:
            raise ValueError(f"{name} has no batch: say how long a step is by step_ms")
        return replay.build(name, rank, seed, step_ms, trace)
    if step_ms is not None or trace is not None:
        raise ValueError(f"{name} really computes: step_ms and trace are for replay")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: give 1 or more samples a rank")
    if name == "gpt":
        return gpt.build(rank, seed, batch_size)
    if name == "digits":
        return digits.build(rank, size, seed, batch_size)
    return synthetic.build(name, rank, seed, batch_size)
