"""An optimizer of the user's own, with rates by layer, and what it saves."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Net, batch, begin, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LARS(torch.optim.Optimizer):
    """Layer-wise rates (You et al., 2017), with momentum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "trust": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad.add(p, alpha=1e-4)
                norm, length = torch.linalg.norm(p), torch.linalg.norm(update)
                if p.ndim > 1 and norm > 0 and length > 0:
                    update = update * (group["trust"] * norm / length)
                memory = self.state[p].setdefault("mu", torch.zeros_like(p))
                memory.mul_(group["momentum"]).add_(update)
                p.add_(memory, alpha=-group["lr"])


def main() -> dict[str, object]:
    args = begin()
    model = DDP(Net())
    optimizer = LARS(model.parameters(), lr=0.5)
    path, losses = Path(args.out, "lars.pth"), []
    for step in range(16):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 7:
            if args.rank == 0:
                state = {"model": model.state_dict(), "lars": optimizer.state_dict()}
                torch.save(state, path)
            dist.barrier()
            saved = torch.load(path)
            optimizer.load_state_dict(saved["lars"])
            model.load_state_dict(saved["model"])
    return {"losses": losses, "weights": values(model)}


if __name__ == "__main__":
    main()
