"""Two networks on seeded synthetic classes: few large tensors, and many small ones.

`mlp` is 1024-1024-1024-1024-10 with biases: 3 (1024^2 + 1024) + 10 x 1024 + 10 =
3,159,050 parameters, 12.6 MB of gradients, in 8 tensors. `tiny600` is 300 residual
layers of 32 x 32 + 32: 316,800 parameters in 600 tensors, so that what a tensor costs
shows and what a byte costs does not.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtide.lab.workloads.workload import (
    HELD_OUT,
    TASK,
    TRAIN,
    Batch,
    Workload,
    classifier,
    seeded,
    stream,
)

BATCH_SIZE = 32  # samples a rank
NUM_HELD_OUT = 512
SEPARATION = 8.0  # distance between class centres in deviations of the noise
MLP_WIDTH, MLP_CLASSES = 1024, 10
TINY_LAYERS, TINY_WIDTH = 300, 32


class TinyLayers(nn.Module):
    """Residual layers of 32 x 32; the last activations are the logits."""

    def __init__(self) -> None:
        super().__init__()
        width = TINY_WIDTH
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(TINY_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            # The branches of all layers together add about one unit.
            x = x + layer(x.relu()) * TINY_LAYERS**-0.5
        return x


def mlp() -> nn.Sequential:
    width = MLP_WIDTH
    return nn.Sequential(
        *(part for _ in range(3) for part in (nn.Linear(width, width), nn.ReLU())),
        nn.Linear(width, MLP_CLASSES),
    )


def centres(seed: int, num_classes: int, width: int) -> NDArray[np.float32]:
    """One point a class, about SEPARATION apart; the same on every rank."""
    points = stream(TASK, seed).standard_normal((num_classes, width), dtype=np.float32)
    scaled: NDArray[np.float32] = points * np.float32(SEPARATION / np.sqrt(2 * width))
    return scaled


def draw(
    points: NDArray[np.float32], random: np.random.Generator, batch_size: int
) -> Batch:
    """Samples of unit normal noise around the centres of random classes."""
    y = random.integers(len(points), size=batch_size)
    noise = random.standard_normal((batch_size, points.shape[1]), dtype=np.float32)
    return torch.from_numpy(points[y] + noise), torch.from_numpy(y)


def build(name: str, rank: int, seed: int, batch_size: int | None) -> Workload:
    with seeded(seed):
        model = mlp() if name == "mlp" else TinyLayers()
    shape = (MLP_CLASSES, MLP_WIDTH) if name == "mlp" else (TINY_WIDTH, TINY_WIDTH)
    points = centres(seed, *shape)
    held_out = draw(points, stream(HELD_OUT, seed), NUM_HELD_OUT)

    def batch(step: int) -> Batch:
        return draw(points, stream(TRAIN, seed, rank, step), batch_size or BATCH_SIZE)

    return classifier(name, model, batch, held_out)
