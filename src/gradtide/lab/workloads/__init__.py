"""What the lab trains: models with data, optimizer and schedule, by name."""

from __future__ import annotations

from pathlib import Path

from gradtide.lab.workloads import digits, gpt, own, replay, synthetic
from gradtide.lab.workloads.workload import Batch, Workload

__all__ = ["REPLAYED", "WORKLOADS", "Batch", "Workload", "build", "check"]

REPLAYED = (
    "replay:resnet50",  # 25.6 M parameters in 161 tensors
    "replay:bert-base",  # 109 M in 199
    "replay:bert-large",  # 335 M in 391
    "replay:bert-base-pretraining",  # 110 M in 206, tied head
    "replay:bert-large-pretraining",  # 336 M in 398, tied head
    "replay:gpt2",  # 124 M in 148, tied head
    "replay:gpt-30m",  # 30 M in 100, tied head
)
WORKLOADS = (*gpt.SIZES, "digits", "mlp", "tiny600", *REPLAYED)


def build(
    name: str,
    rank: int,
    size: int,
    seed: int = 0,
    step_ms: float | None = None,
    trace: Path | None = None,
    batch_size: int | None = None,
) -> Workload:
    """The named workload as this rank sees it, or the user's, `module:function`.

    `batch_size` counts samples a rank and is for computed workloads; `step_ms`
    (milliseconds of forward and backward) and `trace` are for replayed ones.
    """
    if own.is_own(name):
        _check_options(name, step_ms, trace, batch_size)
        return own.build(name, rank, size, seed)
    if name not in WORKLOADS:
        raise ValueError(
            f"no workload {name!r}: choose one of {', '.join(WORKLOADS)}, "
            f"or {own.USAGE}"
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}: ranks count from 0 to size - 1")
    if name in REPLAYED:
        if batch_size is not None:
            raise ValueError(f"{name} has no batch: say how long a step is by step_ms")
        return replay.build(name, rank, seed, step_ms, trace)
    _check_options(name, step_ms, trace)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: give 1 or more samples a rank")
    if name in gpt.SIZES:
        return gpt.build(name, rank, seed, batch_size)
    if name == "digits":
        return digits.build(rank, size, seed, batch_size)
    return synthetic.build(name, rank, seed, batch_size)


def check(
    name: str,
    size: int,
    step_ms: float | None = None,
    trace: Path | None = None,
    batch_size: int | None = None,
) -> None:
    """Raise ValueError for what `build` would, of `size` ranks.

    What is small is built; of a replay, whose tensors are large, only the timings are.
    """
    if own.is_own(name):
        _check_options(name, step_ms, trace, batch_size)
        own.check(name)
        return
    if name in REPLAYED and batch_size is None:
        replay.timings(name, step_ms, trace)
        return
    build(name, rank=0, size=size, step_ms=step_ms, trace=trace, batch_size=batch_size)


def _check_options(
    name: str, step_ms: float | None, trace: Path | None, batch_size: int | None = None
) -> None:
    if step_ms is not None or trace is not None:
        raise ValueError(f"{name} really computes: step_ms and trace are for replay")
    if batch_size is not None:
        raise ValueError(f"{name} says itself how large a batch is")
