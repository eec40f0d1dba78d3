"""What trains: a transformer of GPT-2's shape, a text, and who exchanges for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradtide
from gpu.setting import Setting
from gradtide.lab.contestants import BASELINES, casting
from gradtide.lab.workloads.gpt import GPT, Size


@dataclass(frozen=True)
class Shape(Size):
    """That of the lab's transformer, with one matrix for table and head."""

    tied: bool = True

    @property
    def parameters(self) -> int:
        rows = self.vocabulary + self.length + 12 * self.width * self.layers
        return self.width * (rows + 2 * self.layers + 1)


GPT2 = Shape(768, 12, 12, 1024, 50304)  # 124 M parameters
BYTES = Shape(512, 8, 8, 256)  # 25 M
TINY = Shape(64, 2, 2, 64)


def transformer(setting: Setting, shape: Shape) -> GPT:
    """The same on every rank."""
    torch.manual_seed(0)
    return GPT(shape).to(setting.device)


def adamw(setting: Setting, model: nn.Module, rate: float = 6e-4) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), fused=setting.cuda
    )


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss of the next token; in bf16 where autocast says so."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


# - Who exchanges ----------------------------------------------------------------------

ALONE = "alone"  # nobody exchanges: what computing takes


class Entrant:
    """A model in training under one way of exchanging; `module` is called for it."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        self.module: nn.Module = model
        self.replica: Any = None
        if name in BASELINES:
            self.module = ddp = DistributedDataParallel(
                model,
                process_group=group,
                gradient_as_bucket_view=True,
                static_graph=True,
            )
            dtype = BASELINES[name][1]
            if dtype is not None:
                ddp.register_comm_hook(group, casting(dtype))
        elif name != ALONE:
            self.replica = gradtide.replicate(
                model, optimizer, name, process_group=group
            )

    def step(self, tokens: Tensor) -> None:
        loss_of(self.module, tokens).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def flush(self) -> None:
        if self.replica is not None:
            self.replica.flush()

    def agreed(self) -> AbstractContextManager[None]:
        """Inside, the model has what all ranks agreed on last."""
        if self.replica is None:
            return nullcontext()
        found: AbstractContextManager[None] = self.replica.shared_parameters()
        return found

    def sent_bytes(self, steps: int, size: int) -> float:
        """By a rank since the last call; of a baseline what a ring sends in steps."""
        if self.replica is not None:
            return float(self.replica.metrics()["sent_bytes"])
        dtype = BASELINES[self.name][1] or torch.float32
        numel = sum(p.numel() for p in self.model.parameters())
        return 2 * (size - 1) / size * numel * dtype.itemsize * steps

    def leave(self) -> None:
        """Collective."""
        if self.replica is not None:
            self.replica.remove()
