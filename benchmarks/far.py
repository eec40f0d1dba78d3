"""Buckets of 25 MB and hardly any compute: what a step takes where messages are late.

    gradtide compare --workload benchmarks.far:build --hosts 4 --rate 200mbit \
        --delay 100ms --schemes ddp,wfbp --out out/far
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

LAYERS, WIDTH = 25, 500  # 6,250,000 parameters
LR = 1e-9  # nothing is to be learned


def build() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """A chain of equal layers, SGD, and the loss of one example."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    example = torch.ones(1, WIDTH)
    return model, optimizer, lambda: model(example).sum()
