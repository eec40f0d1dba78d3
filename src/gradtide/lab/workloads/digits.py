"""Handwritten digits (8 x 8, from scikit-learn) and a small convolutional network.

Small enough to reach its final accuracy in seconds; has BatchNorm, so that buffers
are exercised and not only parameters.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from gradtide.lab.checks import require
from gradtide.lab.workloads.workload import (
    TRAIN,
    Batch,
    Workload,
    classifier,
    seeded,
    stream,
)

BATCH_SIZE = 32  # images a rank
NUM_HELD_OUT = 360  # the last 20 % of 1797: other writers than those trained on


def network() -> nn.Sequential:
    """Images (batch, 1, 8, 8) to logits (batch, 10); 9,978 parameters.

    Convolutions 144 + 4,608, norms 32 + 64, linear 32 x 4 x 4 x 10 + 10 = 5,130.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def images() -> tuple[Batch, Batch]:
    """Training images and held-out images, pixels from 0 to 1, with their labels."""
    require("lab", "sklearn")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).float().div_(16).view(-1, 1, 8, 8)
    y = torch.from_numpy(labels).long()
    held_out = x[-NUM_HELD_OUT:], y[-NUM_HELD_OUT:]
    return (x[:-NUM_HELD_OUT], y[:-NUM_HELD_OUT]), held_out


def shard(
    data: Batch, seed: int, rank: int, size: int, batch_size: int, step: int
) -> Batch:
    """This rank's part of the step's images: no image twice in an epoch, over all."""
    x, y = data
    num_steps = len(x) // (size * batch_size)
    epoch, position = divmod(step, num_steps)
    order = stream(TRAIN, seed, step=epoch).permutation(len(x))
    first = (position * size + rank) * batch_size
    chosen: Tensor = torch.from_numpy(order[first : first + batch_size])
    return x[chosen], y[chosen]


def build(rank: int, size: int, seed: int, batch_size: int | None) -> Workload:
    train, held_out = images()
    each = batch_size or BATCH_SIZE
    if size * each > len(train[0]):
        raise ValueError(
            f"{size} ranks x {each} images a step are more than the {len(train[0])} "
            f"there are: use a batch size of at most {len(train[0]) // size}"
        )
    with seeded(seed):
        model = network()
    batch = partial(shard, train, seed, rank, size, each)
    return classifier("digits", model, batch, held_out)
