"""Two optimizers for one model, as Muon for matrices and Adam for the rest."""

import torch
from common import batch, begin, mlp, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> dict[str, object]:
    begin()
    model = DDP(mlp())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizers = [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
        torch.optim.AdamW(rest, lr=1e-2),
    ]
    losses = []
    for step in range(14):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return {"losses": losses, "weights": values(model)}


if __name__ == "__main__":
    main()
