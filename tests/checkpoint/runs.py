"""A small training with everything that a run may have, saved and resumed on ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtide
from gradtide.checkpoint import Checkpointer

STEPS = 12


class Run:
    """A model, an optimizer, a scheduler, a generator and a loop that uses them all."""

    def __init__(
        self, folder: Path | str, scheme: str = "wfbp", kind: str = "adamw", **more: Any
    ) -> None:
        rank = dist.get_rank()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1)
        )
        self.model.append(nn.Linear(8, 2))
        kinds: dict[str, Any] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
        }
        self.optimizer = kinds[kind](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 8])
        self.generator = torch.Generator().manual_seed(rank)
        self.seen, self.skipped = 0, 0
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(rank + 1)
        self.sync = gradtide.replicate(self.model, self.optimizer, scheme)
        arguments = {"every": 3, "signals": (), **more}
        self.keeper = Checkpointer(
            folder,
            self.sync,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            generator=self.generator,
            seen=lambda: self.seen,
            **arguments,
        )

    def step(self) -> bool:
        """One step, which depends on all that is to be saved; whether to leave."""
        x = torch.randn(4, 6, generator=self.generator) + random.random() / 10
        x += float(np.random.rand()) / 10
        self.model(x).square().mean().backward()
        if self.seen + 1 != self.skipped:  # as by a GradScaler
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.seen += 1
        return self.keeper.step()

    def go(self, begin: int = 0, end: int = STEPS) -> int:
        """Train up to a step, or until all leave; returns the last."""
        for step in range(begin, end):
            if self.step():
                return step + 1
        return end

    def resume(self, **how: Any) -> int:
        begin = self.keeper.resume(**how)
        self.seen = self.keeper.values.get("seen", 0)
        assert self.seen == begin
        return begin

    def end(self) -> list[Any]:
        """What there is when the run is over, of which another one's is to be equal."""
        self.sync.flush()
        found = [p.detach().clone() for p in self.model.state_dict().values()]
        states = self.optimizer.state_dict()["state"].values()
        found += [torch.as_tensor(v).clone() for s in states for v in s.values()]
        found += [torch.tensor(self.optimizer.param_groups[0]["lr"])]
        own = self.sync.state_dict()[f"rank{dist.get_rank()}"]["remainders"]
        found += own.values()
        found += [torch.rand(2), torch.rand(2, generator=self.generator)]
        found += [torch.tensor(random.random()), torch.tensor(np.random.rand())]
        self.keeper.close()
        self.sync.remove(end_round=False)
        return listed(found)


def listed(tensors: Iterable[Tensor]) -> list[Any]:
    """Numbers that can be sent to another process, and compared bit for bit."""
    return [[t.dtype, t.shape, t.tolist()] for t in tensors]
