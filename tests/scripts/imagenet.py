"""As PyTorch's ImageNet example: epochs, validation, a schedule, a checkpoint."""

from pathlib import Path

import torch
import torch.distributed as dist
from common import Net, batch, begin, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def validate(model: nn.Module) -> float:
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for step in range(900, 903):
            x, y = batch(step)
            total += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def main() -> dict[str, object]:
    args = begin()
    model = DDP(Net())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    losses, accuracies = [], []
    path = Path(args.out, "checkpoint.pth")
    for epoch in range(4):
        model.train()
        for step in range(6):
            x, y = batch(10 * epoch + step)
            loss = criterion(model(x), y)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracies.append(validate(model))
        scheduler.step()
        if args.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"scheduler": scheduler.state_dict()}, path)
        dist.barrier()
        saved = torch.load(path)  # as a run that was stopped here
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    return {"losses": losses, "seen": accuracies, "weights": values(model)}


if __name__ == "__main__":
    main()
