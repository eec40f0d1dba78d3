"""A head alone, then everything: the module is wrapped anew, with a new optimizer."""

import torch
from common import batch, begin, mlp, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> dict[str, object]:
    begin()
    net = mlp()
    net[0].requires_grad_(False)
    model = DDP(net)
    head = [p for p in model.parameters() if p.requires_grad]
    losses = train(model, torch.optim.SGD(head, lr=0.1), range(6))
    model.module[0].requires_grad_(True)
    model = DDP(model.module)
    losses += train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(6, 12))
    # A second optimizer takes over from the first, without wrapping.
    second = torch.optim.SGD(model.parameters(), lr=0.05)
    losses += train(model, second, range(12, 18))
    return {"losses": losses, "weights": values(model)}


if __name__ == "__main__":
    main()
