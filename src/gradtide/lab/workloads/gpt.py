"""Two decoder-only transformers, really trained on a text that every machine has.

The text is the sources of Python's own standard library: no download and no licence
question. Machines with another Python version have a slightly different one; that
changes the data, never the shapes.

Parameters of `gpt`, with d = 192: a block has 3 d^2 (query, key, value) + d^2 + 4 d^2
+ 4 d^2 = 12 d^2 = 442,368 and two norms of d; six blocks 2,656,512; token table and
head 2 x 256 d = 98,304; positions 128 d = 24,576; last norm 192: 2,779,584 in all,
11.1 MB of gradients. At 100 Mb/s among 4 hosts a dense exchange of them takes
2 (3/4) 11.1 MB / 12.5 MB/s = 1.3 s.

`gpt-small` has d = 96 and three blocks: 393,888 parameters, 1.58 MB of gradients. It
learns within a minute, and stands at 50 Mb/s about where `gpt` does: an exchange takes
some times as long as computing.

There are no biases: the bias of a key has a gradient of exactly zero, and Adam makes
full-size steps of its rounding noise, so that no two runs would agree.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gradtide.lab.workloads.workload import (
    TRAIN,
    Batch,
    Workload,
    classification_loss,
    evaluating,
    seeded,
    stream,
)

VOCABULARY = 256  # bytes
BLOCK = 128  # bytes that a model looks at
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 20
DECAY_STEPS = 600  # the cosine ends here, at FINAL_RATE of the peak
FINAL_RATE = 0.1
EVALUATION_BATCHES, EVALUATION_BATCH_SIZE = 8, 8
MAX_BYTES = 8_000_000  # read at most; more only costs start-up time
HELD_OUT_EVERY = 20  # one file in so many is held out: about 5 % of the text
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Size:
    """What tells transformers apart."""

    width: int
    heads: int
    layers: int
    length: int = BLOCK  # of a sequence, at the most
    vocabulary: int = VOCABULARY
    tied: bool = False  # table and head are one matrix
    batch_size: int = 8  # sequences a rank


SIZES = {
    "gpt": Size(192, 6, 6, batch_size=6),  # forward and backward 0.2 s on one thread
    "gpt-small": Size(96, 3, 3, batch_size=3),
}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query_key_value = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads: Tensor = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer, normalised before each of its two halves."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        inner = F.gelu(self.up(self.norm2(x)))
        return x + self.down(inner)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Tokens (batch, at most `length`) to logits (batch, length, `vocabulary`)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.token.weight
        for name, matrix in self.named_parameters():
            if matrix.dim() == 2:
                # The branches, two a layer, that add to x together add one unit.
                last = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * size.layers) if last else 0.02
                nn.init.normal_(matrix, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(where)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def adamw(model: nn.Module) -> AdamW:
    """AdamW that decays matrices and leaves norms alone: two parameter groups."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def warm_up_cosine(optimizer: Optimizer) -> LambdaLR:
    """Linear warm-up, then half a cosine down to FINAL_RATE of the peak."""

    def rate(step: int) -> float:
        if step < WARM_UP_STEPS:
            return (step + 1) / WARM_UP_STEPS
        done = min(1.0, (step - WARM_UP_STEPS) / (DECAY_STEPS - WARM_UP_STEPS))
        return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, rate)


def corpus(max_bytes: int = MAX_BYTES) -> tuple[Tensor, Tensor]:
    """Training text and held-out text as bytes (uint8), split by whole files."""
    train, held_out, total = bytearray(), bytearray(), 0
    for position, path in enumerate(_sources()):
        content = path.read_bytes()[: max_bytes - total]
        (train if position % HELD_OUT_EVERY else held_out).extend(content)
        total += len(content)
        if total >= max_bytes:
            break
    first, second = (np.frombuffer(part, np.uint8) for part in (train, held_out))
    return torch.from_numpy(first), torch.from_numpy(second)


def windows(text: Tensor, starts: NDArray[np.int64]) -> Batch:
    """Inputs of BLOCK bytes from each start, and the same moved on by one byte."""
    at = torch.from_numpy(starts[:, None] + np.arange(BLOCK + 1))
    tokens = text[at].long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _sources() -> Iterator[Path]:
    """Python files of the standard library in an order that is the same everywhere."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        paths = (Path(folder, name) for name in files if name.endswith(".py"))
        kept.extend(path.relative_to(root).as_posix() for path in paths)
    if len(kept) < 2 * HELD_OUT_EVERY:
        raise ValueError(
            f"found {len(kept)} source files of the standard library: the text "
            "workload needs a Python installed with its sources, not a zipped one"
        )
    return (root / path for path in sorted(kept))


def sample(text: Tensor, seed: int, rank: int, size: int, step: int) -> Batch:
    """`size` random windows of the text, a pure function of (seed, rank, step)."""
    starts = stream(TRAIN, seed, rank, step).integers(len(text) - BLOCK, size=size)
    return windows(text, starts)


def held_out_loss(text: Tensor, model: nn.Module) -> dict[str, float]:
    """Mean loss in nats a byte on windows evenly spaced over the text."""
    number = EVALUATION_BATCHES * EVALUATION_BATCH_SIZE
    starts = np.linspace(0, len(text) - BLOCK - 1, number, dtype=np.int64)
    parts = starts.reshape(EVALUATION_BATCHES, EVALUATION_BATCH_SIZE)
    with evaluating(model):
        losses = [
            classification_loss(model, windows(text, part)).item() for part in parts
        ]
    return {"loss": sum(losses) / len(losses)}


def build(name: str, rank: int, seed: int, batch_size: int | None) -> Workload:
    """One of `SIZES`; `batch_size` counts sequences of BLOCK bytes a rank."""
    size, (train, held_out) = SIZES[name], corpus()
    with seeded(seed):
        model = GPT(size)
    return Workload(
        name=name,
        model=model,
        optimizer=adamw(model),
        batch=partial(sample, train, seed, rank, batch_size or size.batch_size),
        loss=classification_loss,
        evaluate=partial(held_out_loss, held_out),
        scheduler=warm_up_cosine,
        max_norm=1.0,
    )
