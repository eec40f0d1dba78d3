"""As MAE: several backward passes add up before a step, all of them exchanged."""

import torch
from common import batch, begin, mlp, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 2


def total_norm(model: nn.Module) -> torch.Tensor:
    grads = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    return torch.norm(torch.stack([torch.norm(grad, 2.0) for grad in grads]), 2.0)


def main() -> dict[str, object]:
    args = begin()
    model = DDP(mlp(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses, norms = [], []
    optimizer.zero_grad()
    for step in range(20):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        scaler.scale(loss / ACCUMULATE).backward()
        if (step + 1) % ACCUMULATE == 0:
            scaler.unscale_(optimizer)
            norms.append(total_norm(model).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {"losses": losses, "near": norms, "weights": values(model)}


if __name__ == "__main__":
    main()
