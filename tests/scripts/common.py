"""What the programs share: tiny models, and data that differs between ranks."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn


def begin() -> argparse.Namespace:
    """Join the other ranks, as under torchrun, and read the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="a folder that all ranks see")
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.rank = int(os.environ["RANK"])
    torch.manual_seed(args.rank)  # ranks begin unlike, and are made alike
    return args


def batch(step: int, size: int = 8, inputs: int = 12) -> tuple[Tensor, Tensor]:
    """This rank's batch: which of four corners of a cube a noisy point belongs to."""
    seed = 1000 * step + dist.get_rank()
    rng = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 4, (size,), generator=rng)
    corners = torch.randn(4, inputs, generator=torch.Generator().manual_seed(7))
    return corners[classes] + 0.5 * torch.randn(size, inputs, generator=rng), classes


def mlp(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, outputs))


class Net(nn.Module):
    """Convolutions, norms with buffers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(96, 32), nn.ReLU())
        self.fc = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.body(self.norm(self.stem(x[:, None]))))
        return found


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class GPT(nn.Module):
    """A language model of 32 tokens, with a head tied to the embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(32, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Numbers that are counted up by three."""
    rng = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    start = torch.randint(0, 32, (6, 1), generator=rng)
    line = (start + 3 * torch.arange(9)) % 32
    return line[:, :-1], line[:, 1:]


def values(*modules: nn.Module) -> list[list[float]]:
    """All parameters and buffers, to be compared by their bits."""
    return [
        tensor.detach().double().flatten().tolist()
        for module in modules
        for tensor in module.state_dict().values()
    ]
