"""What a workload is, and the seeding that all of them share.

Knows nothing of any particular model, and nothing of ranks beyond two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradtide.lab.devices import placed

Batch: TypeAlias = tuple[Tensor, Tensor]


class Timing(NamedTuple):
    """Seconds of computing, or of waiting in its place: in a step or one unit of it."""

    forward: float
    backward: float


# First component of every data stream's seed: streams of different use never meet.
TASK, TRAIN, HELD_OUT, NOISE = range(4)


@dataclass(frozen=True)
class Workload:
    """A model and everything needed to train it, the same on every rank but for data.

    `batch` is a pure function of (seed, rank, step) and touches no global random
    state. `loss` and `evaluate` call the module that they are given, which may be
    wrapped, where its parameters are. Every rank calls `evaluate`: hooks on that module
    may communicate.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    max_norm: float | None = None  # norm to which gradients are clipped; None: never
    waits: Timing | None = None  # in the place of compute: a replay's


def stream(use: int, seed: int, rank: int = 0, step: int = 0) -> np.random.Generator:
    """A fresh generator that depends on all four numbers and on nothing else."""
    return np.random.default_rng((use, seed, rank, step))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Modules made inside are initialised from `seed`; the global state is kept."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the accelerators, too.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode found is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the model's logits; the last dimension is the classes."""
    x, y = placed(batch, model)
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def classification_scores(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Loss and accuracy (0 to 1) on one batch, in evaluation mode."""
    x, y = placed(batch, model)
    with evaluating(model):
        logits = model(x)
    accuracy = (logits.argmax(-1) == y).double().mean()
    return {"loss": F.cross_entropy(logits, y).item(), "accuracy": accuracy.item()}


def classifier(
    name: str, model: nn.Module, batch: Callable[[int], Batch], held_out: Batch
) -> Workload:
    """A workload of classes, learned by SGD with momentum."""
    return Workload(
        name=name,
        model=model,
        optimizer=SGD(model.parameters(), lr=0.05, momentum=0.9),
        batch=batch,
        loss=classification_loss,
        evaluate=partial(classification_scores, batch=held_out),
    )
