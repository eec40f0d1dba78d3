"""Five tasks that differ in kind, small enough to train hundreds of times.

`source`    a causal convolutional language model of the sources of sympy, or of Python
            itself where that is missing; AdamW
`manual`    a transformer with biases, normalised behind each half, on the texts of
            Python's language reference; Adam
`recurrent` a GRU on the same texts, with another split; Adam
`conv`      a residual convolutional network with BatchNorm that tells how a patch of a
            photograph was turned, and of which it is; SGD with momentum
`mixer`     an MLP-mixer that does the same; AdamW

The photographs are the two that scikit-learn ships. Nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gradtide.lab.workloads.workload import (
    HELD_OUT,
    TRAIN,
    Batch,
    Workload,
    classification_loss,
    evaluating,
    seeded,
    stream,
)

LENGTH = 64  # bytes that a language model looks at
PATCH = 16  # pixels, each way
WARM_UP_STEPS = 20
FINAL_RATE = 0.1
EVALUATED = 512  # held-out samples


def along(steps: int, optimizer: Optimizer) -> LambdaLR:
    """Linear warm-up, then half a cosine that ends after `steps`."""

    def rate(step: int) -> float:
        if step < WARM_UP_STEPS:
            return (step + 1) / WARM_UP_STEPS
        done = min(1.0, (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS))
        return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, rate)


# - Language -----------------------------------------------------------------------


class CausalConvolutions(nn.Module):
    """Bytes (batch, length) to logits (batch, length, 256), by dilated convolutions."""

    def __init__(self, width: int = 128, layers: int = 5) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2**n) for n in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for number, (layer, norm) in enumerate(
            zip(self.layers, self.norms, strict=True)
        ):
            earlier = nn.functional.pad(norm(x).mT, (2**number, 0))
            x = x + nn.functional.glu(layer(earlier), dim=1).mT
        return self.head(x)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Bytes (batch, LENGTH) to logits (batch, LENGTH, 256): torch's own layers."""

    def __init__(self, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 3 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        size = tokens.shape[1]
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        x = self.token(tokens) + self.position[:size]
        for layer in self.layers:
            x = layer(x, src_mask=later)
        return self.head(x)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Bytes (batch, length) to logits (batch, length, 256), by two layers of GRU."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 64)
        self.gru = nn.GRU(64, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.token(tokens))[0])  # type: ignore[no-any-return]


@cache
def sources() -> bytes:
    """Sources of sympy (2 MB of them), or of Python's standard library."""
    spec = find_spec("sympy") or find_spec("json")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    root = root if spec.name == "sympy" else root.parent
    text = b"".join(p.read_bytes() for p in sorted(root.glob("*/*.py"))[:300])
    return text[:2_000_000]


@cache
def manual() -> bytes:
    """The language reference, as `help()` shows it: half a megabyte of English."""
    return "\n".join(topics.topics[key] for key in sorted(topics.topics)).encode()


def windows(text: Tensor, starts: np.ndarray[Any, np.dtype[np.int64]]) -> Batch:
    """Inputs of LENGTH bytes from each start, and the same moved on by one byte."""
    at = torch.from_numpy(starts[:, None] + np.arange(LENGTH + 1))
    tokens = text[at].long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sentences(
    text: bytes, held_out: float, batch_size: int, seed: int, rank: int
) -> tuple[Callable[[int], Batch], Batch]:
    """Batches by step, and held-out windows: those of a stretch at the text's end."""
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    edge = int(len(whole) * (1 - held_out))
    train, rest = whole[:edge], whole[edge:]
    starts = np.linspace(0, len(rest) - LENGTH - 1, EVALUATED // 4, dtype=np.int64)

    def batch(step: int) -> Batch:
        draw = stream(TRAIN, seed, rank, step)
        return windows(train, draw.integers(len(train) - LENGTH - 1, size=batch_size))

    return batch, windows(rest, starts)


# - Images ---------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def convolutional(classes: int) -> nn.Module:
    """Patches (batch, 3, PATCH, PATCH) to logits (batch, classes)."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        Residual(24),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        Residual(48),
        nn.Conv2d(48, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (PATCH // 4) ** 2, classes),
    )


class Mixer(nn.Module):
    """Patches (batch, 3, PATCH, PATCH) to logits (batch, classes): MLPs alone."""

    def __init__(self, classes: int, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        tokens = (PATCH // 4) ** 2
        self.cut = nn.Conv2d(3, width, 4, stride=4)
        self.across, self.along = (
            nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(size),
                    nn.Linear(size, inner),
                    nn.GELU(),
                    nn.Linear(inner, size),
                )
                for _ in range(layers)
            )
            for size, inner in ((tokens, 64), (width, 3 * width))
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2)
        for across, along in zip(self.across, self.along, strict=True):
            x = x + across(x)
            x = x + along(x.mT).mT
        return self.head(x.mean(2))  # type: ignore[no-any-return]


@cache
def photographs() -> Tensor:
    """The two of scikit-learn: (2, 3, 427, 640), around zero."""
    from sklearn.datasets import load_sample_images

    images = np.stack(load_sample_images().images)
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(64).sub_(2)


def turned(held_out: bool, number: int, draw: np.random.Generator) -> Batch:
    """Patches turned by quarters, by how many, and of which photograph: 8 classes.

    The right fifth of each photograph is held out.
    """
    photos = photographs()
    edge = int(photos.shape[3] * 0.8)
    low, high = (edge, photos.shape[3] - PATCH) if held_out else (0, edge - PATCH)
    image = draw.integers(2, size=number)
    top = draw.integers(photos.shape[2] - PATCH, size=number)
    left = draw.integers(low, high, size=number)
    turns = draw.integers(4, size=number)
    rows = [
        torch.rot90(photos[i, :, y : y + PATCH, x : x + PATCH], int(t), (1, 2))
        for i, y, x, t in zip(image, top, left, turns, strict=True)
    ]
    return torch.stack(rows), torch.from_numpy(turns + 4 * image)


def patches(
    batch_size: int, seed: int, rank: int
) -> tuple[Callable[[int], Batch], Batch]:
    """Batches by step, and held-out patches."""

    def batch(step: int) -> Batch:
        return turned(False, batch_size, stream(TRAIN, seed, rank, step))

    return batch, turned(True, EVALUATED, stream(HELD_OUT, 0))


# - The five -----------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model, its data, and an optimizer that lacks a learning rate.

    Args:
        model: Makes the module.
        data: Makes batches and held-out samples of a seed and a rank.
        optimizer: Makes the optimizer, of parameters and `lr`.
        rates: Learning rates from which the one for dense training is chosen.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int, int], tuple[Callable[[int], Batch], Batch]]
    optimizer: Callable[..., Optimizer]
    rates: tuple[float, ...]


ADAM = partial(Adam, betas=(0.9, 0.99))
ADAMW = partial(AdamW, betas=(0.9, 0.95), weight_decay=0.1)
TASKS = {
    "source": Task(
        CausalConvolutions,
        lambda seed, rank: sentences(sources(), 0.1, 4, seed, rank),
        ADAMW,
        (1e-3, 3e-3, 1e-2),
    ),
    "manual": Task(
        Transformer,
        lambda seed, rank: sentences(manual(), 0.1, 4, seed, rank),
        ADAM,
        (1e-3, 2e-3, 4e-3),
    ),
    "recurrent": Task(
        Recurrent,
        lambda seed, rank: sentences(manual(), 0.2, 4, seed, rank),
        ADAM,
        (2e-3, 5e-3, 1e-2),
    ),
    "conv": Task(
        partial(convolutional, 8),
        partial(patches, 8),
        partial(SGD, momentum=0.9, weight_decay=1e-4),
        (0.01, 0.03, 0.1),
    ),
    "mixer": Task(partial(Mixer, 8), partial(patches, 16), ADAMW, (1e-3, 3e-3, 1e-2)),
}


def held_out_loss(samples: Batch, model: nn.Module) -> dict[str, float]:
    """Mean cross-entropy on held-out samples, in nats."""
    with evaluating(model):
        return {"loss": classification_loss(model, samples).item()}


def build(name: str, rank: int, seed: int, rate: float, steps: int) -> Workload:
    """A task as this rank sees it, with a learning rate that decays over `steps`."""
    task = TASKS[name]
    batch, samples = task.data(seed, rank)
    with seeded(seed):
        model = task.model()
    return Workload(
        name=name,
        model=model,
        optimizer=task.optimizer(model.parameters(), lr=rate),
        batch=batch,
        loss=classification_loss,
        evaluate=partial(held_out_loss, samples),
        scheduler=partial(along, steps),
        max_norm=1.0,
    )
