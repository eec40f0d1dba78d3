"""A range test of learning rates, which puts everything back; then the training."""

import copy

import torch
import torch.distributed as dist
from common import Net, batch, begin, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train_one(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> dict[str, object]:
    begin()
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    curve: list[float] = []
    for step in range(10):
        loss = torch.tensor(train_one(model, optimizer, step))
        dist.all_reduce(loss)
        curve.append(loss.item())
        if loss > 4 * min(curve):
            break
        optimizer.param_groups[0]["lr"] *= 3
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12)
    losses = []
    for step in range(12):
        losses.append(train_one(model, optimizer, step))
        cycle.step()
    return {"losses": losses, "seen": curve, "weights": values(model)}


if __name__ == "__main__":
    main()
