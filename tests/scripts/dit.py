"""As DiT: an average of the weights by hand, after every step."""

from copy import deepcopy
from pathlib import Path

import torch
from common import batch, begin, mlp, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float = 0.8) -> None:
    averages = dict(ema.named_parameters())
    for name, p in model.named_parameters():
        averages[name].mul_(decay).add_(p.data, alpha=1 - decay)


def main() -> dict[str, object]:
    args = begin()
    model = mlp()
    ema = deepcopy(model)
    for p in ema.parameters():
        p.requires_grad = False
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    update_ema(ema, model.module, decay=0)
    model.train()
    ema.eval()
    losses = []
    for step in range(12):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema(ema, model.module)
        losses.append(loss.item())
    if args.rank == 0:
        state = {"model": model.module.state_dict(), "ema": ema.state_dict()}
        torch.save(state | {"args": args}, Path(args.out, "dit.pt"))
    return {"losses": losses, "weights": values(model, ema)}


if __name__ == "__main__":
    main()
