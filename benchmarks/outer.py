"""Outer steps without rounds: whether they lower the loss of dense training.

    torchrun --nproc-per-node 4 benchmarks/outer.py \
        --out benchmarks/records/outer_202611.json

Ranks exchange gradients densely in every step, so all have the same parameters, and an
outer step costs no message. Two ways are tried on the five tasks of
`benchmarks/tasks.py`, each with the best of three learning rates, beside training
without them: a step of Nesterov's momentum along what the last steps did together (as
DiLoCo's with one worker; SNOO), and gradients taken between the iterate and an average
of iterates (primal averaging, as in schedule-free optimizers and GPA). Written from the
papers' formulas, for this comparison alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from contest import contest
from tasks import TASKS, build
from torch import Tensor, nn

import gradtide


class Outer(Protocol):
    """What is done around a step of the optimizer."""

    def before(self) -> None: ...
    def after(self, step: int) -> None: ...
    def evaluated(self) -> None: ...


class Plain:
    def __init__(self, model: nn.Module) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]

    def before(self) -> None: ...
    def after(self, step: int) -> None: ...
    def evaluated(self) -> None: ...


class Nesterov(Plain):
    """After `every` steps: v = mu v + d, x -= rate (d + mu v), from where it was."""

    every, rate, mu = 10, 0.7, 0.6

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.slow = [p.detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(p) for p in self.params]

    def after(self, step: int) -> None:
        if (step + 1) % self.every:
            return
        for p, slow, velocity in zip(
            self.params, self.slow, self.velocity, strict=True
        ):
            moved = slow - p
            velocity.mul_(self.mu).add_(moved)
            slow.sub_(moved.add(velocity, alpha=self.mu), alpha=self.rate)
            p.copy_(slow)


class LongerNesterov(Nesterov):
    every, rate, mu = 25, 0.8, 0.5


class Averaging(Plain):
    """Steps move z; x is an average of z; gradients are of y = mu x + (1 - mu) z."""

    keep, mu = 0.95, 0.8

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.z = [p.detach().clone() for p in self.params]
        self.x = [p.detach().clone() for p in self.params]
        self.y: list[Tensor] = []

    def before(self) -> None:
        self.y = [p.detach().clone() for p in self.params]

    def after(self, step: int) -> None:
        for p, x, y, z in zip(self.params, self.x, self.y, self.z, strict=True):
            z.add_(p - y)
            x.lerp_(z, 1 - self.keep)
            p.copy_(torch.lerp(z, x, self.mu))

    def evaluated(self) -> None:
        for p, x in zip(self.params, self.x, strict=True):
            p.copy_(x)


WAYS: dict[str, type[Plain]] = {
    "none": Plain,
    "Nesterov after 10 steps": Nesterov,
    "Nesterov after 25 steps": LongerNesterov,
    "averaging": Averaging,
}


def train(task: str, way: str, rate: float, seed: int, steps: int) -> float:
    work = build(task, dist.get_rank(), seed, rate, steps)
    assert work.evaluate is not None
    assert work.scheduler is not None
    model, optimizer = work.model, work.optimizer
    scheduler = work.scheduler(optimizer)
    sync = gradtide.replicate(model, optimizer, "wfbp")
    outer: Outer = WAYS[way](model)
    for step in range(steps):
        work.loss(model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            outer.before()
            sync.clip_grad_norm_(1.0)
            optimizer.step()
            outer.after(step)
        optimizer.zero_grad()
        scheduler.step()
    with torch.no_grad():
        outer.evaluated()
    loss = work.evaluate(model)["loss"]
    sync.remove()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    def run(task: str, way: str, rate: float, seed: int) -> float:
        return train(task, way, rate, seed, args.steps)

    contest(WAYS, run, args, steps=args.steps)


if __name__ == "__main__":
    main()
